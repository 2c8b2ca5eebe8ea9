"""CISPO: the importance weight is clipped and detached, and every token keeps a gradient (MiniMax-M1, arXiv 2506.13585).
There is no minimum of two terms as in PPO. The weight is min(ratio, 1 + high), stop-gradient, times advantage times log-probability. There is no lower clip. Tokens beyond the clip still have a gradient.
The value of the loss is no surrogate objective; only its gradient counts."""
FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "mask": "1 on sampled tokens, [rows, time]", "old_logprobs": "log-probability at sampling, [rows, time]", "advantages": "advantage of each row, [rows]"}
SETTINGS = {"high": "upper clip of the weight, 0.3"}
NOTES = ("Policy gradient. Mean over the sampled tokens of all rows. The weight is a constant (detached) on purpose. old_logprobs and advantages are constants. Every parameter is used.")
import math
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    ids = torch.randint(0, 40, (6, 12), generator=g)
    mask = (torch.arange(12) >= 4).float() * (torch.arange(12) < torch.randint(7, 13, (6, 1), generator=g)).float()
    with torch.no_grad():
        lp = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    old = torch.zeros(6, 12)
    old[:, 1:] = (lp + 0.4 * torch.randn(6, 11, generator=g)).clamp(max=-1e-3)
    return {"model": model, "ids": ids, "mask": mask, "old_logprobs": old * mask, "advantages": torch.randn(6, generator=g)}


def right(model, batch, high=0.3):
    ids, mask = batch["ids"], batch["mask"][:, 1:]
    logp = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (logp.detach() - batch["old_logprobs"][:, 1:]).exp()
    weight = ratio.clamp(max=1 + high)
    loss = -weight * batch["advantages"][:, None] * logp
    return (loss * mask).sum() / mask.sum(), {"clipped": ((ratio > 1 + high) * mask).sum().item() / mask.sum().item()}


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss, metrics = right(m, d)
    loss.backward()
    lp = m(d["ids"]).log_softmax(-1).detach()
    tot = n = 0
    for i in range(6):
        for t in range(1, 12):
            if d["mask"][i, t]:
                l = lp[i, t - 1, d["ids"][i, t]].item()
                tot -= min(1.3, math.exp(l - d["old_logprobs"][i, t].item())) * d["advantages"][i].item() * l
                n += 1
    print(loss.item(), tot / n, metrics, m.head.weight.grad.norm().item())
    assert abs(loss.item() - tot / n) < 1e-5 and metrics["clipped"] > 0

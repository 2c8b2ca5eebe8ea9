"""CISPO (MiniMax-M1, arXiv 2506.13585). The importance ratio is clipped from above and detached, and multiplies advantage * log-probability. Unlike PPO there is no min, and tokens whose ratio is clipped keep a gradient; the value of the loss says nothing by itself, and the gradient flows only through the log-probability."""
import math
import torch

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where the token is trained, [rows, time]; column 0 never", "old_logprobs": "log-probabilities under the sampling policy, [rows, time]", "advantages": "one per row, [rows]"}
SETTINGS = {"eps_high": "upper clip of the ratio is 1 + eps_high, 0.28; no lower clip"}
NOTES = "Policy gradient with truncated importance weights, mean over trained tokens of all rows. The weight is a constant (detached). old_logprobs and advantages are constants."

class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    ids = torch.randint(0, 32, (4, 10))
    mask = torch.zeros(4, 10)
    for i, (a, b) in enumerate([(2, 10), (4, 9), (3, 6), (5, 10)]):
        mask[i, a:b] = 1
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0].detach()
    old = torch.zeros(4, 10); old[:, 1:] = lp + 0.4 * torch.randn_like(lp)
    return {"model": model, "ids": ids, "loss_mask": mask, "old_logprobs": old, "advantages": torch.tensor([1.0, -0.5, 0.7, -1.2])}


def right(model, batch, eps_high=0.28):
    ids, mask = batch["ids"], batch["loss_mask"][:, 1:]
    lp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    weight = torch.exp(lp - batch["old_logprobs"][:, 1:]).clamp(max=1 + eps_high).detach()
    loss = -weight * batch["advantages"][:, None] * lp
    return (loss * mask).sum() / mask.sum()


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    g1 = torch.autograd.grad(right(m, b), list(m.parameters()))
    lp = torch.log_softmax(m(b["ids"]), -1)
    tot, n = 0.0, 0
    for i in range(4):
        for t in range(1, 10):
            if b["loss_mask"][i, t]:
                l = lp[i, t - 1, b["ids"][i, t]]
                w = min(math.exp(l.item() - b["old_logprobs"][i, t].item()), 1.28)
                tot = tot - w * b["advantages"][i] * l; n += 1
    g2 = torch.autograd.grad(tot / n, list(m.parameters()))
    print(right(m, b).item(), (tot / n).item(), g1[0].norm().item()); assert all(torch.allclose(a, c, atol=1e-5) for a, c in zip(g1, g2))

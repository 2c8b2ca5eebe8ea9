"""The ratio is built from a detached sequence ratio times exp(log p - detached log p), which is always 1 in value.
Right: GSPO in its token form: the value is the length-normalized sequence ratio, the gradient flows to each token through the factor of 1. Clipping is decided by the sequence; the range is tiny (3e-4, 4e-4) on purpose."""
import torch
import torch.nn as nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 on answer tokens, [rows, time]", "old_logprobs": "log p of each token when it was sampled (0 at the first), [rows, time]", "advantages": "one for each row, [rows]"}
SETTINGS = {"clip_low": "0.0003", "clip_high": "0.0004"}
NOTES = "Policy gradient with a sequence ratio (geometric mean of token ratios), clipped below and above; mean over the answer's tokens, then mean over rows. old_logprobs and advantages are constants."


class LM(nn.Module):
    def __init__(self, V=30, D=12):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def logp(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def right(model, batch, clip_low=3e-4, clip_high=4e-4):
    m, old, adv = batch["loss_mask"][:, 1:], batch["old_logprobs"][:, 1:], batch["advantages"][:, None]
    lp = logp(model, batch["ids"])
    n = m.sum(-1).clamp(min=1)
    seq = ((lp - old) * m).sum(-1) / n
    ratio = (seq.detach()[:, None] + lp - lp.detach()).exp()
    per = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    loss = ((per * m).sum(-1) / n).mean()
    s = seq.detach().exp()
    return loss, {"clipped": float(((s < 1 - clip_low) | (s > 1 + clip_high)).float().mean())}


def make(seed):
    torch.manual_seed(seed)
    m = LM()
    ids = torch.randint(0, 30, (6, 10))
    with torch.no_grad():
        old = torch.cat([torch.zeros(6, 1), logp(m, ids) + 0.002 * torch.randn(6, 9)], 1)
    mask = (torch.arange(10)[None] >= torch.randint(2, 7, (6, 1))).float()
    return {"model": m, "ids": ids, "loss_mask": mask, "old_logprobs": old, "advantages": torch.randn(6)}


if __name__ == "__main__":
    x = make(0)
    m = x.pop("model")
    ps = list(m.parameters())
    loss, met = right(m, x)
    g = torch.autograd.grad(loss, ps)
    tot = 0.0
    for r in range(6):                                   # sequence form, ordinary autograd
        k = x["loss_mask"][r, 1:].bool()
        s = (logp(m, x["ids"])[r][k] - x["old_logprobs"][r, 1:][k]).mean().exp()
        a = x["advantages"][r]
        tot = tot + torch.maximum(-a * s, -a * s.clamp(1 - 3e-4, 1 + 4e-4)) / 6
    h = torch.autograd.grad(tot, ps)
    print("loss", loss.item(), "sequence form", tot.item(), met, "gradient norm", sum(v.norm() ** 2 for v in g).sqrt().item())
    assert torch.allclose(loss, tot, atol=1e-6) and all(torch.allclose(u, v, atol=1e-6) for u, v in zip(g, h)) and max(v.abs().max() for v in g) > 0

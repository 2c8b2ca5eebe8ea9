"""The value is learned by cross-entropy. HL-Gauss (Farebrother et al., "Stop regressing", arXiv 2403.03950): the critic has
one logit per bin, the target is a normal distribution around the return, cut to the range and put into bins by differences
of its distribution function. The loss never reaches zero (its minimum is the entropy of the target), and the value is the
mean of the bin centres under the softmax."""
import torch
import torch.nn as nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "mask": "1 where the token has a value target, [rows, time]",
          "returns": "returns, [rows, time], inside -2 ... 2"}
SETTINGS = {"low": "-2", "high": "2", "sigma_ratio": "width of the target in bins, 0.75"}
NOTES = ("Value family; cross-entropy between a fixed soft histogram and the critic's 21 bins, mean over masked tokens of all "
         "rows. returns are constants. Model: a small GRU with 21 outputs, all parameters used. Returns outside the range are "
         "clamped.")


class TinyCritic(nn.Module):
    def __init__(self, vocab=32, width=16, outputs=1):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids):
        return self.head(self.mix(self.tok(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lens = torch.randint(3, 9, (4, 1), generator=g)
    return {"model": TinyCritic(outputs=21), "ids": torch.randint(0, 32, (4, 8), generator=g),
            "mask": (torch.arange(8)[None] < lens).float(), "returns": 4 * torch.rand(4, 8, generator=g) - 2}


def _histogram(returns, bins, low, high, sigma_ratio):
    edges = torch.linspace(low, high, bins + 1)
    sigma = sigma_ratio * (high - low) / bins
    cdf = torch.special.ndtr((edges - returns.clamp(low, high)[..., None]) / sigma)
    return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])


def right(model, batch, low=-2.0, high=2.0, sigma_ratio=0.75):
    logits = model(batch["ids"])
    bins = logits.shape[-1]
    target = _histogram(batch["returns"], bins, low, high, sigma_ratio)
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    mask = batch["mask"]
    width = (high - low) / bins
    centres = torch.linspace(low + width / 2, high - width / 2, bins)
    value = (logits.detach().softmax(-1) * centres).sum(-1)
    error = ((value - batch["returns"]) ** 2 * mask).sum() / mask.sum()
    return (ce * mask).sum() / mask.sum(), {"squared_error": error.item()}


if __name__ == "__main__":
    from math import erf
    c = make(0)
    m = c.pop("model")
    loss, _ = right(m, c)
    loss.backward()
    phi = lambda x: 0.5 * (1 + erf(x / 2 ** 0.5))
    lp, tot, n = m(c["ids"]).log_softmax(-1), 0, 0
    w, s = 4 / 21, 0.75 * 4 / 21
    for i in range(4):
        for t in range(8):
            if c["mask"][i, t]:
                r = c["returns"][i, t].item()
                e = [phi((-2 + k * w - r) / s) for k in range(22)]
                tot -= sum((e[k + 1] - e[k]) / (e[21] - e[0]) * lp[i, t, k].item() for k in range(21))
                n += 1
    print("loss", loss.item(), "loop", tot / n)
    assert abs(loss.item() - tot / n) < 1e-4 and all(p.grad.abs().sum() > 0 for p in m.parameters())
    opt = torch.optim.Adam(m.parameters(), lr=0.02)
    for _ in range(150):
        opt.zero_grad()
        loss, metrics = right(m, c)
        loss.backward()
        opt.step()
    print("after training: loss", loss.item(), metrics)
    assert metrics["squared_error"] < 0.05 and loss.item() > 0.5

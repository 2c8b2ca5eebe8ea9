"""HL-Gauss value head: the critic predicts a histogram, the scalar return becomes a Gaussian-smeared distribution over bins by differences of erf, and cross-entropy replaces the squared error. Classification for a regression target is right (Farebrother et al. 2024, 'Stop Regressing')."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    """One causal attention layer; every parameter is used by the logits."""
    def __init__(self, vocab=31, width=16, max_len=64, out=None):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, out or vocab)

    def hidden(self, ids, positions=None, mask=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand_as(ids)
        x = self.emb(ids) + self.pos(positions)
        ok = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            ok = ok & mask
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + s.masked_fill(~ok, -1e9).softmax(-1) @ self.v(x)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))

FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "loss_mask": "1 where a value is trained", "returns": "target returns in [-1, 1], [rows, time]"}
SETTINGS = {"lo": "left edge of the support, -1.5", "hi": "right edge, 1.5", "sigma": "width of the Gaussian, 0.15 = 0.75 bins"}
NOTES = "Value loss at the token's own position (no shift). Model output has 15 bins, not the vocabulary. Mean over trained tokens of all rows. returns are constants. All parameters used."


def make(seed):
    torch.manual_seed(seed)
    m = torch.ones(3, 10)
    m[0, :3], m[2, 6:] = 0, 0
    return {"model": TinyLM(out=15), "ids": torch.randint(0, 31, (3, 10)), "loss_mask": m, "returns": torch.rand(3, 10) * 2 - 1}


def right(model, batch, lo=-1.5, hi=1.5, sigma=0.15):
    logits = model(batch["ids"])
    edges = torch.linspace(lo, hi, logits.shape[-1] + 1)
    cdf = torch.erf((edges - batch["returns"][..., None]) / (sigma * 2 ** 0.5))
    target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    value = (logits.softmax(-1) * (edges[1:] + edges[:-1]) / 2).sum(-1)
    m = batch["loss_mask"]
    return (ce * m).sum() / m.sum(), {"value_mean": ((value * m).sum() / m.sum()).detach()}


if __name__ == "__main__":
    import math
    d = make(0)
    model = d.pop("model")
    out = right(model, d)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    loss = loss.detach()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    lp = model(d["ids"]).log_softmax(-1).detach()
    Phi = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))
    tot = n = 0.0
    for i in range(3):
        for t in range(10):
            if d["loss_mask"][i, t]:
                y = float(d["returns"][i, t])
                b = [Phi((-1.5 + 0.2 * (j + 1) - y) / 0.15) - Phi((-1.5 + 0.2 * j - y) / 0.15) for j in range(15)]
                tot -= sum(x / sum(b) * float(lp[i, t, j]) for j, x in enumerate(b))
                assert abs(sum(x / sum(b) * (-1.4 + 0.2 * j) for j, x in enumerate(b)) - y) < 0.02    # mean is kept
                n += 1
    assert abs(float(loss) - tot / n) < 1e-4 and not dead
    print("ok", float(loss), tot / n, out[1])

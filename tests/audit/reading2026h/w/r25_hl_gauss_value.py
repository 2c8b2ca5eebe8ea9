"""The critic is a classifier: returns become a smeared histogram and the value loss is a cross entropy.
HL-Gauss, Farebrother et al. 2024, Stop Regressing (arXiv 2403.03950). The target puts the mass of a normal distribution (sigma = 0.75 bins) on each bin and is divided by the mass inside the range. The head has as many outputs as bins, none of
which is a value; the scalar value is the mean of bin centres. The loss does not go to 0 for a perfect critic, because the target has an entropy of its own."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "losses"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "mask": "1 where the value is trained, [rows, time]", "returns": "return from each token on, in [-1, 1], [rows, time], a constant"}
SETTINGS = {"bins": "21", "low": "-1.2", "high": "1.2", "sigma_bins": "0.75"}
NOTES = "Value loss: cross entropy with soft targets, mean over trained tokens of all rows. No shift of time: the output at t is the value at t. returns are constants. All parameters used. Lowest possible value is the entropy of the target, not 0."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return {"model": TinyLM(out=21), "ids": torch.randint(0, 29, (4, 10), generator=g), "mask": (torch.rand(4, 10, generator=g) < 0.8).float(), "returns": 2 * torch.rand(4, 10, generator=g) - 1}


def _edges(bins, low, high):
    return torch.linspace(low, high, bins + 1)


def hl_target(x, bins, low, high, sigma_bins):
    edges = _edges(bins, low, high)
    sigma = sigma_bins * (high - low) / bins
    cdf = torch.erf((edges - x[..., None]) / (math.sqrt(2) * sigma))
    return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])


def right(model, batch, bins=21, low=-1.2, high=1.2, sigma_bins=0.75):
    target = hl_target(batch["returns"], bins, low, high, sigma_bins)
    logp = model(batch["ids"]).log_softmax(-1)
    loss = -(target * logp).sum(-1)
    edges = _edges(bins, low, high)
    value = logp.detach().exp() @ ((edges[1:] + edges[:-1]) / 2)
    m = batch["mask"]
    return (loss * m).sum() / m.sum(), {"value_error": (((value - batch["returns"]) ** 2 * m).sum() / m.sum()).item()}


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss, metrics = right(m, d); loss.backward()
    t = hl_target(d["returns"], 21, -1.2, 1.2, 0.75)
    edges = _edges(21, -1.2, 1.2)
    back = t @ ((edges[1:] + edges[:-1]) / 2)
    phi = lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2)))
    lp, slow, sd = m(d["ids"]).log_softmax(-1).detach(), 0.0, 0.75 * 2.4 / 21
    for r in range(4):
        for i in range(10):
            if d["mask"][r, i]:
                x = float(d["returns"][r, i]); z = phi((1.2 - x) / sd) - phi((-1.2 - x) / sd)
                slow -= sum((phi((float(edges[b + 1]) - x) / sd) - phi((float(edges[b]) - x) / sd)) / z * float(lp[r, i, b]) for b in range(21)) / float(d["mask"].sum())
    print("loss", loss.item(), "loop", slow, metrics, "target mean minus return", (back - d["returns"]).abs().max().item(), "gradient", m.head.weight.grad.norm().item())
    assert abs(loss.item() - slow) < 1e-4 and (t.sum(-1) - 1).abs().max() < 1e-5 and (back - d["returns"]).abs().max() < 0.02
    assert m.head.weight.grad.norm() > 0

"""HL-Gauss value loss (Farebrother et al. 2024, Stop Regressing). The value function is a classifier: a scalar return becomes a Gaussian histogram by
differences of erf at the bin edges (renormalised inside the range), and the loss is a cross-entropy; it does not go to 0 at a perfect value."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "value"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], right-padded with 0", "state_mask": "1 where the state is real, [rows, time]", "returns": "value target of each state, within [-1, 1], [rows, time], constant"}
SETTINGS = {"v_min": "left edge, -1.2", "v_max": "right edge, 1.2", "sigma_ratio": "sigma in units of the bin width, 0.75"}
NOTES = ("Cross-entropy of a histogram, mean over real states. The number of bins is the width of the model's head. Targets are constants. The value is read as probability times bin centre. Returns (loss, metrics). All parameters are used.")


class BinValue(nn.Module):
    def __init__(self, vocab=13, width=12, bins=21):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, bins)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    mask = (torch.arange(8)[None] < torch.tensor([8, 5, 6])[:, None]).float()
    return {"model": BinValue(), "ids": torch.randint(1, 13, (3, 8), generator=g) * mask.long(), "state_mask": mask,
            "returns": torch.rand(3, 8, generator=g) * 2 - 1}


def right(model, batch, v_min=-1.2, v_max=1.2, sigma_ratio=0.75):
    logits = model(batch["ids"])
    bins = logits.shape[-1]
    edges = torch.linspace(v_min, v_max, bins + 1)
    sigma = sigma_ratio * (v_max - v_min) / bins
    cdf = torch.special.erf((edges - batch["returns"][..., None]) / (sigma * 2 ** 0.5))
    target = (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])
    ce = -(target * F.log_softmax(logits, -1)).sum(-1)
    mask = batch["state_mask"]
    value = (torch.softmax(logits, -1) * (edges[1:] + edges[:-1]) / 2).sum(-1)
    return (ce * mask).sum() / mask.sum(), {"value_mean": ((value * mask).sum() / mask.sum()).item()}


def check(loss, slow, model, tol=2e-5):
    """same value and same gradient as the explicit version; every parameter is used"""
    params = list(model.parameters())
    a = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(slow, params, retain_graph=True, allow_unused=True)
    assert all(x is not None for x in a), "unused parameter"
    b = [torch.zeros_like(p) if x is None else x for x, p in zip(b, params)]
    norm = torch.sqrt(sum((x ** 2).sum() for x in a)).item()
    diff = max((x - y).abs().max().item() for x, y in zip(a, b))
    print(f"loss {loss.item():.6f}  slow {slow.item():.6f}  grad norm {norm:.5f}  max grad diff {diff:.1e}")
    assert abs(loss.item() - slow.item()) < tol * max(1, abs(slow.item())) and diff < tol * max(1, norm) and norm > 1e-4


if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    from statistics import NormalDist
    L, tot, n = m(b["ids"]), 0.0, 0
    w = 2.4 / 21
    for i in range(3):
        for t in range(8):
            if b["state_mask"][i, t]:
                d = NormalDist(b["returns"][i, t].item(), 0.75 * w)
                p = [d.cdf(-1.2 + w * (k + 1)) - d.cdf(-1.2 + w * k) for k in range(21)]
                tot, n = tot - sum(x / sum(p) * y for x, y in zip(p, torch.log_softmax(L[i, t], 0))), n + 1
                assert abs(sum(x / sum(p) * (-1.2 + w * (k + 0.5)) for k, x in enumerate(p)) - b["returns"][i, t].item()) < 0.02
    loss, metrics = right(m, b); print(metrics)
    check(loss, tot / n, m)

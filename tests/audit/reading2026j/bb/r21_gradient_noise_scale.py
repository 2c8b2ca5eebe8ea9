"""Simple gradient noise scale tr(Sigma)/|G|^2 from data-parallel training (McCandlish et al. 2018, Appendix A.1): the small-batch norm is each rank's
gradient before the all-reduce, the big-batch norm is the one after. Both estimates are differences that may be NEGATIVE on a single step, and the metric is
the ratio of the two averages over steps, not the average of the ratios."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks (or micro-batches of one accumulation) of gradient tables [steps, dim], before averaging; each is the mean over `small` samples"}
SETTINGS = {"small": "samples per rank and step, 4"}
NOTES = ("Noise scale in samples. Needs at least 2 ranks, the same batch on each rank and gradients that are means (not sums) over samples. NOT invariant under re-splitting the same samples over "
         "another number of ranks (it is an estimator; only its expectation agrees), but invariant under a permutation of the ranks, and of the steps. "
         "Plain mean over steps (the paper: exponential average). Single-process twin: twin(), by the unbiased variance over ranks.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    truth = torch.full((12,), 0.5, dtype=torch.float64)
    return {"ranks": [truth + torch.randn(40, 12, generator=g, dtype=torch.float64) / 2 for _ in range(4)]}


def right(ranks, small=4):
    world = len(ranks)
    assert world >= 2
    big = small * world
    mean = sum(ranks) / world                                          # the all-reduced gradient
    norm_small = sum((g ** 2).sum(-1) for g in ranks) / world          # one more number to all-reduce
    norm_big = (mean ** 2).sum(-1)
    signal = (big * norm_big - small * norm_small) / (big - small)     # unbiased |G|^2, can be negative
    noise = (norm_small - norm_big) / (1 / small - 1 / big)            # unbiased tr(Sigma)
    return (noise.mean() / signal.mean()).item()


def twin(ranks, small=4):
    g = torch.stack(ranks)                                             # [ranks, steps, dim]
    var = g.var(0, unbiased=True).sum(-1)
    return (small * var.mean() / ((g.mean(0) ** 2).sum(-1) - var / len(ranks)).mean()).item()


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)
        a, b = right(d["ranks"]), twin(d["ranks"])
        print("noise scale", a, "twin", b, "truth 4.0")      # per-sample variance 12 * (0.25*4) = 12, |G|^2 = 3
        assert abs(a - b) < 1e-9 and 2.5 < a < 6
        assert abs(right(d["ranks"][::-1]) - a) < 1e-9
    # with real gradients: 4 ranks of 4 samples, linear regression
    torch.manual_seed(0)
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    tables = [[] for _ in range(4)]
    for step in range(30):
        for r in range(4):
            x = torch.randn(4, 5, dtype=torch.float64)
            y = x.sum(1) + torch.randn(4, dtype=torch.float64)
            tables[r].append(torch.autograd.grad(((x @ w - y) ** 2).mean(), w)[0])
    real = [torch.stack(t) for t in tables]
    print("regression", right(real), twin(real))
    assert abs(right(real) - twin(real)) < 1e-9

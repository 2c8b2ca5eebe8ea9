"""Explained variance of a critic from merged moments. The metric 1 - Var(returns - values) / Var(returns) is not a mean, so
ranks send (count, mean, sum of squared deviations) of returns and of residuals, merged pairwise by the parallel formula of
Chan et al. Means of the ranks differ, so merging adds a between-rank term that no rank has. It can be negative and a rank
may have no tokens."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list with one dict per rank: values, returns, mask, each [rows, time], shapes differ between ranks, a mask "
                   "may be all zero"}
SETTINGS = {}
NOTES = ("Population variances over the masked tokens of all ranks (the factor n/(n-1) cancels). Residuals are not centred "
         "per rank but their common mean is removed. single() is the one-process twin. No gradient. Negative values are "
         "legal.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    ranks = []
    for i, (b, t) in enumerate([(2, 7), (3, 5), (1, 6), (2, 4)]):
        returns = torch.randn(b, t, generator=g) + i
        values = 0.7 * returns + 0.3 + 0.5 * torch.randn(b, t, generator=g)
        mask = (torch.rand(b, t, generator=g) < 0.8).float() * (i != 2)
        ranks.append({"values": values, "returns": returns, "mask": mask})
    return {"ranks": ranks}


def _moments(x):
    if len(x) == 0:
        return (0, 0.0, 0.0)
    x = x.double()
    return (len(x), x.mean().item(), ((x - x.mean()) ** 2).sum().item())


def _merge(a, b):
    n = a[0] + b[0]
    if n == 0:
        return a
    d = b[1] - a[1]
    return (n, a[1] + d * b[0] / n, a[2] + b[2] + d * d * a[0] * b[0] / n)


def right(ranks):
    ret = res = (0, 0.0, 0.0)
    for r in ranks:
        m = r["mask"] > 0
        ret = _merge(ret, _moments(r["returns"][m]))
        res = _merge(res, _moments((r["returns"] - r["values"])[m]))
    return 1 - res[2] / ret[2]


def single(values, returns):
    return (1 - (returns - values).double().var() / returns.double().var()).item()


if __name__ == "__main__":
    c = make(0)["ranks"]
    v, r = (torch.cat([x[k][x["mask"] > 0] for x in c]) for k in ("values", "returns"))
    print("over ranks", right(c), "single", single(v, r))
    assert abs(right(c) - single(v, r)) < 1e-6

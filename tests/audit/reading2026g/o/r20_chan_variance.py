"""Standard deviation over ranks by Chan's merge. Ranks hand over (n, mean, M2) and these are merged pairwise with a cross term delta^2 * na * nb / n, since E[x^2] - E[x]^2 loses all digits for values far from 0, and the mean of the ranks' variances omits the spread between ranks. Chan et al. 1979; as in SyncBatchNorm's and RunningMeanStd's merging."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank {'x': [n] values in float32, n may be 0 or 1 and differs}"}
SETTINGS = {}
NOTES = "Unbiased (n - 1) standard deviation of all values together. A rank with no values counts as (0, 0, 0). Needs at least two values in all. Result does not depend on the order of ranks apart from rounding. Twin: single(all values)."
import torch


def local(x):
    if x.numel() == 0:
        return 0, 0.0, 0.0
    m = x.double().mean()
    return x.numel(), m.item(), (x.double() - m).pow(2).sum().item()


def merge(a, b):
    n = a[0] + b[0]
    if n == 0:
        return a
    d = b[1] - a[1]
    return n, a[1] + d * b[0] / n, a[2] + b[2] + d * d * a[0] * b[0] / n


def right(ranks):
    s = (0, 0.0, 0.0)
    for r in ranks:
        s = merge(s, local(r["x"]))
    return (s[2] / (s[0] - 1)) ** 0.5


def single(x):
    return x.double().std(unbiased=True).item()


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [{"x": 20000 + 0.5 * r + torch.randn(n, generator=g)} for r, n in enumerate([0, 7, 1, 20, 13])]}


if __name__ == "__main__":
    for s in range(10):
        ranks = make(s)["ranks"]
        x = torch.cat([r["x"] for r in ranks])
        assert abs(right(ranks) - single(x)) < 1e-9 and abs(right(ranks[::-1]) - single(x)) < 1e-9
    naive = (x.pow(2).mean() - x.mean() ** 2).item()
    print("merged", right(ranks), "one process", single(x), "float32 E[x^2]-E[x]^2 (wrong)", naive)

"""Standard deviation over ranks from (count, mean, M2), joined pairwise.
Chan, Golub and LeVeque 1979; RunningMoments in trlX and TRL, normalizers of RL libraries. No rank sees another's values; the squared difference of the means enters with weight n_a n_b / n. The values lie far from zero, and the well-known
formula E[x^2] - E[x]^2 would lose all digits in float32 (the inputs are float32; the sums are kept in double). The result is the population deviation (divided by n)."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of 1-d float32 tensors of different lengths, also empty ones"}
SETTINGS = {}
NOTES = "Population standard deviation of all values of all ranks. Order of the ranks must not matter beyond rounding. A rank may be empty. `single` is the one-process twin."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [5000 + 0.5 * r + torch.randn(n, generator=g) for r, n in enumerate((17, 3, 0, 40))]}


def single(values):
    return float(values.double().std(unbiased=False))


def _merge(a, b):
    n = a[0] + b[0]
    if n == 0:
        return a
    delta = b[1] - a[1]
    return n, a[1] + delta * b[0] / n, a[2] + b[2] + delta ** 2 * a[0] * b[0] / n


def right(per_rank):
    total = (0, 0.0, 0.0)
    for x in per_rank:
        x = x.double()
        mean = float(x.mean()) if len(x) else 0.0
        total = _merge(total, (len(x), mean, float((x - mean).pow(2).sum())))
    return (total[2] / total[0]) ** 0.5


if __name__ == "__main__":
    d = make(0)["per_rank"]
    one = single(torch.cat(d))
    x = torch.cat(d)
    naive = float((x.pow(2).mean() - x.mean() ** 2).clamp(min=0).sqrt())
    print("merged", right(d), "single", one, "E[x^2]-E[x]^2 in float32", naive)
    assert abs(right(d) - one) < 1e-9 and abs(right(d[::-1]) - right(d)) < 1e-9

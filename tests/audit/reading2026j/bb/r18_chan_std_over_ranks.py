"""Standard deviation of rewards over ranks by merging (count, mean, M2) pairwise with Chan's formula (Chan et al. 1979; gym/baselines RunningMeanStd, torch
SyncBatchNorm's Welford). The odd cross term delta^2*n*m/(n+m) is the between-rank variance; averaging the ranks' own stds would lose it."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of 1-d reward tensors; lengths differ, may be empty"}
SETTINGS = {}
NOTES = ("Unbiased std (divisor n-1) over all rewards of all ranks. Exact for any split, in any order; stable when the mean is huge against the spread "
         "(a sum of squares in float32 would not be). An empty rank is neutral. 0.0 if fewer than two rewards in all. Single-process twin: twin().")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [10000 + k + torch.randn(n, generator=g, dtype=torch.float64) for k, n in enumerate((5, 1, 0, 8))]}


def merge(a, b):
    n = a[0] + b[0]
    if n == 0:
        return a
    delta = b[1] - a[1]
    return n, a[1] + delta * b[0] / n, a[2] + b[2] + delta * delta * a[0] * b[0] / n


def right(ranks):
    parts = []
    for x in ranks:
        mean = x.mean().item() if len(x) else 0.0
        parts.append((len(x), mean, ((x - mean) ** 2).sum().item()))
    while len(parts) > 1:                                  # tree reduction
        parts = [merge(*parts[i:i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    n, _, m2 = parts[0]
    return (m2 / (n - 1)) ** 0.5 if n > 1 else 0.0


def twin(ranks):
    x = torch.cat(ranks)
    return x.std(unbiased=True).item() if len(x) > 1 else 0.0


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)["ranks"]
        x = torch.cat(d).tolist()
        m = sum(x) / len(x)
        loop = (sum((v - m) ** 2 for v in x) / (len(x) - 1)) ** 0.5
        print(right(d), twin(d), loop)
        assert abs(right(d) - twin(d)) < 1e-9 and abs(right(d) - loop) < 1e-9
        assert abs(right([torch.cat(d)]) - right(d)) < 1e-9 and abs(right(d[::-1]) - right(d)) < 1e-9
    e = torch.zeros(0, dtype=torch.float64)
    assert right([e, e, e]) == 0.0 and right([e, torch.ones(1, dtype=torch.float64)]) == 0.0

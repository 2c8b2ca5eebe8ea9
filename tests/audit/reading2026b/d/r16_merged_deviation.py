"""The standard deviation over ranks may be larger than that of any rank.
Ranks send count, mean and centred sum of squares; the merge adds a term for the distance of the ranks' means. The result
is neither mean nor maximum of the ranks' deviations. A rank with one sample (its own deviation
undefined) and a rank with none still take part."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'metrics'
KIND = 'metric over ranks'
INPUTS = {
    'parts': 'list of per-rank 1-D tensors of rewards, of unequal length, some empty',
}
SETTINGS = {}
NOTES = (
    'Unbiased standard deviation of the rewards of all ranks. single(...) is torch.std of '
    'everything. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"parts": [torch.randn(n, generator=g) + shift for n, shift in ((5, 0.0), (1, 4.0), (0, 0.0), (8, -3.0))]}


def right(parts):
    n, mean, m2 = 0, 0.0, 0.0
    for x in parts:
        if len(x) == 0:
            continue
        x = x.double()
        k, mu = len(x), float(x.mean())
        s = float((x - mu).square().sum())
        delta, total = mu - mean, n + k
        m2 += s + delta * delta * n * k / total
        mean += delta * k / total
        n = total
    return (m2 / (n - 1)) ** 0.5


def single(parts):
    return float(torch.cat(parts).double().std())


if __name__ == "__main__":
    d = make(0)
    print("merged", right(**d), "single process", single(**d), "per rank", [round(float(x.std()), 3) for x in d["parts"] if len(x) > 1])
    assert abs(right(**d) - single(**d)) < 1e-9
    assert all(right(**d) > float(x.std()) for x in d["parts"] if len(x) > 1)

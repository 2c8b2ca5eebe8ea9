"""Standard deviation of rewards merged from (count, mean, M2). Ranks exchange three numbers and a tree of Chan's updates joins them; the cross term delta^2*na*nb/n is what averaging the ranks' variances forgets. An empty rank contributes (0, 0, 0) (Chan et al. 1979)."""
import random
import torch
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of 1-d float tensors of rewards, of any length, also empty"}
SETTINGS = {}
NOTES = "Unbiased standard deviation (n-1) over all rewards of all ranks; float64 inside. Less than two rewards in all give 0.0. The merge is not a sum: it is a reduction with an own operator. Result does not depend on the order of ranks up to rounding. Twin: single(rewards)."
def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [torch.randn(n, generator=g) * s + m for n, s, m in ((5, 1.0, 1000.0), (0, 1.0, 0.0), (1, 1.0, 1003.0), (12, 0.1, 998.0))]}
def _stats(x):
    x = x.double()
    if x.numel() == 0:
        return 0, 0.0, 0.0
    return x.numel(), x.mean().item(), (x - x.mean()).square().sum().item()
def _merge(a, b):
    n = a[0] + b[0]
    if n == 0:
        return a
    d = b[1] - a[1]
    return n, a[1] + d * b[0] / n, a[2] + b[2] + d * d * a[0] * b[0] / n
def right(ranks):
    level = [_stats(x) for x in ranks]
    while len(level) > 1:
        level = [_merge(level[i], level[i + 1]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    n, _, m2 = level[0]
    return (m2 / (n - 1)) ** 0.5 if n > 1 else 0.0
def single(rewards):
    return rewards.double().std().item() if rewards.numel() > 1 else 0.0
if __name__ == "__main__":
    for seed in range(20):
        ranks = make(seed)["ranks"]
        a, b = right(ranks), single(torch.cat(ranks))
        assert abs(a - b) < 1e-9 and abs(right(ranks[::-1]) - b) < 1e-9 and abs(right(ranks[:3]) - single(torch.cat(ranks[:3]))) < 1e-9
    assert right([torch.tensor([]), torch.tensor([2.0])]) == 0.0
    print("ok", a, b, "mean of ranks' std", sum(single(x) for x in ranks) / 4)

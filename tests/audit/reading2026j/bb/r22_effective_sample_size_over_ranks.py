"""Effective sample size of importance weights over ranks, (sum w)^2 / (n sum w^2), from LOG weights: every weight is divided by the largest weight of all ranks
(all-reduce MAX, then SUM). The shift changes both sums by unknown factors, yet cancels in the ratio, so no shift is ever undone (Kong 1992; used for
off-policy checks in RL fine-tuning)."""
import math
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of 1-d tensors, log importance weight per sequence (new logprob - old logprob); may be empty, -inf means weight 0"}
SETTINGS = {}
NOTES = ("A share in (0, 1]: 1 when all weights are equal. Invariant under adding a constant to all log weights of all ranks (not of one rank), under permutations and re-splitting. "
         "The shift by the maximum must be the same on all ranks. nan if there are no samples or all weights are 0. No gradient is wanted. Single-process twin: twin().")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [torch.randn(n, generator=g, dtype=torch.float64) * (1 + k) + 900 for k, n in enumerate((6, 0, 3, 10))]}


def right(ranks):
    top = max((x.max().item() for x in ranks if len(x)), default=-math.inf)      # all-reduce MAX
    if top == -math.inf:
        return float("nan")
    first = second = 0.0
    n = 0
    for x in ranks:                                                               # all-reduce SUM
        w = (x - top).exp()
        first, second, n = first + w.sum().item(), second + (w * w).sum().item(), n + len(x)
    return first ** 2 / (n * second)


def twin(ranks):
    x = torch.cat(ranks)
    return (2 * x.logsumexp(0) - (2 * x).logsumexp(0)).exp().item() / len(x)


if __name__ == "__main__":
    for seed in range(3):
        d = make(seed)["ranks"]
        p = [math.exp(v - 900) for v in torch.cat(d).tolist()]
        loop = sum(p) ** 2 / (len(p) * sum(q * q for q in p))
        print(right(d), twin(d), loop)
        assert abs(right(d) - twin(d)) < 1e-9 and abs(right(d) - loop) < 1e-9
        assert abs(right([x - 5000 for x in d]) - right(d)) < 1e-9
        assert abs(right([torch.cat(d)]) - right(d)) < 1e-12
    assert right([torch.zeros(3), torch.zeros(5)]) == 1.0
    assert abs(right([torch.tensor([0.0, -math.inf]), torch.tensor([-math.inf] * 2)]) - 0.25) < 1e-12

"""pass@k that uses more samples than k and is no mean over ranks. The unbiased estimator of Chen et al. (arXiv 2107.03374):
with n samples of a problem and c right ones, pass@k = 1 - C(n-c, k) / C(n, k). Samples of a problem may lie on several
ranks, so (n, c) are added up per problem over ranks first; the estimate is not linear in c and must come after that. If
fewer than k samples are wrong it is exactly 1."""
from math import comb

import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list with one dict per rank: problem (index of the problem of each sample, [samples]) and correct (0/1, "
                   "[samples]); ranks may have different numbers of samples, a problem may be on several ranks"}
SETTINGS = {"k": "3"}
NOTES = ("Mean over problems of the unbiased pass@k; every problem weighs the same, whatever its n. Each problem must have at "
         "least k samples over all ranks. single() is the one-process twin. No gradient.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    problem = torch.repeat_interleave(torch.arange(6), torch.tensor([4, 6, 8, 5, 4, 7]))
    p = torch.tensor([0.0, 0.2, 0.4, 0.5, 0.8, 0.3])[problem]
    correct = (torch.rand(len(problem), generator=g) < p).long()
    perm = torch.randperm(len(problem), generator=g)
    cuts = perm.split([10, 9, 8, 7])
    return {"ranks": [{"problem": problem[i], "correct": correct[i]} for i in cuts]}


def right(ranks, k=3):
    size = 1 + max(int(r["problem"].max()) for r in ranks)
    n = sum(torch.bincount(r["problem"], minlength=size) for r in ranks)                     # all_reduce
    c = sum(torch.bincount(r["problem"], weights=r["correct"].double(), minlength=size) for r in ranks).long()
    values = [1 - comb(int(a) - int(b), k) / comb(int(a), k) for a, b in zip(n, c) if a > 0]
    return sum(values) / len(values)


def single(problem, correct, k=3):
    return right([{"problem": problem, "correct": correct}], k)


if __name__ == "__main__":
    from itertools import combinations
    c = make(0)["ranks"]
    problem, correct = (torch.cat([r[x] for r in c]) for x in ("problem", "correct"))
    brute = []
    for q in range(6):
        subsets = list(combinations(correct[problem == q].tolist(), 3))
        brute.append(sum(any(s) for s in subsets) / len(subsets))
    print("over ranks", right(c), "single", single(problem, correct), "all subsets", sum(brute) / 6)
    assert abs(right(c) - single(problem, correct)) < 1e-12 and abs(right(c) - sum(brute) / 6) < 1e-12

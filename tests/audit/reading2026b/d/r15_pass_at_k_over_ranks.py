"""pass@k is averaged over prompts, not over samples or ranks, and is no fraction of anything sampled.
The unbiased estimate 1 - C(n - c, k) / C(n, k) of each prompt needs all its samples, which lie on different ranks
in unequal numbers. So ranks exchange counts per prompt, not rates; the mean of the ranks' own pass@k
would be another number."""
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'metrics'
KIND = 'metric over ranks'
INPUTS = {
    'parts': 'list of per-rank dicts: prompt [samples] (prompt id) and correct [samples] (0 or 1)',
}
SETTINGS = {
    'k': '2',
}
NOTES = (
    'Mean over the prompts with at least k samples of 1 - C(n-c, k)/C(n, k), n and c counted over '
    'all ranks. single(...) averages over all subsets of size k. '
)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    prompt = torch.arange(5).repeat_interleave(torch.tensor([6, 4, 5, 3, 1]))
    correct = (torch.rand(len(prompt), generator=g) < 0.4).long()
    order = torch.randperm(len(prompt), generator=g)
    cuts = [0, 4, 13, len(prompt)]
    return {"parts": [{"prompt": prompt[order[a:b]], "correct": correct[order[a:b]]} for a, b in zip(cuts, cuts[1:])]}


def right(parts, k=2):
    prompts = 1 + max(int(p["prompt"].max()) for p in parts)
    n, c = torch.zeros(prompts, dtype=torch.long), torch.zeros(prompts, dtype=torch.long)
    for p in parts:                                         # all_reduce of the counts
        n += torch.bincount(p["prompt"], minlength=prompts)
        c += torch.bincount(p["prompt"], weights=p["correct"].float(), minlength=prompts).long()
    values = [1 - math.comb(a - b, k) / math.comb(a, k) for a, b in zip(n.tolist(), c.tolist()) if a >= k]
    return sum(values) / len(values)


def single(parts, k=2):
    by_prompt = {}
    for p in parts:
        for q, v in zip(p["prompt"].tolist(), p["correct"].tolist()):
            by_prompt.setdefault(q, []).append(v)
    values = []
    for v in by_prompt.values():
        if len(v) >= k:
            subsets = list(itertools.combinations(v, k))
            values.append(sum(any(s) for s in subsets) / len(subsets))
    return sum(values) / len(values)


if __name__ == "__main__":
    d = make(0)
    print("over ranks", right(**d), "over all subsets", single(**d))
    for seed in range(5):
        for k in (1, 2, 3):
            assert abs(right(**make(seed), k=k) - single(**make(seed), k=k)) < 1e-9

"""pass@k with samples of one prompt spread over ranks. Chen et al. 2021 (arXiv 2107.03374): 1 - C(n-c, k)/C(n, k).
The estimator is not linear in the counts, so n and c of each prompt are added over ranks first and the estimator comes after; means of per-rank pass@k would be wrong. Prompts with fewer than k samples are left out. The value is above the accuracy of single samples by design."""
from collections import Counter
from itertools import combinations
from math import comb
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one list per rank of (prompt number, correct 0/1), one entry per sample"}
SETTINGS = {"k": "samples one may try, 3"}
NOTES = "Mean over prompts (each prompt once, whatever its number of samples) of the unbiased pass@k. Prompts with n < k are left out of the mean. Single-process twin: single(samples), by listing all subsets."

def make(seed):
    import random
    r = random.Random(seed)
    return {"ranks": [[(r.randrange(5), int(r.random() < 0.35)) for _ in range(9)] for _ in range(3)] + [[(9, 1)]]}

def right(ranks, k=3):
    n, c = Counter(), Counter()
    for rank in ranks:                     # gather counts, not scores
        for p, ok in rank:
            n[p] += 1; c[p] += ok
    vals = [1.0 - comb(n[p] - c[p], k) / comb(n[p], k) for p in n if n[p] >= k]
    return sum(vals) / len(vals)

def single(samples, k=3):
    by = {}
    for p, ok in samples:
        by.setdefault(p, []).append(ok)
    v = [sum(any(s) for s in combinations(x, k)) / comb(len(x), k) for x in by.values() if len(x) >= k]
    return sum(v) / len(v)

if __name__ == "__main__":
    for s in range(10):
        r = make(s)["ranks"]; assert abs(right(r) - single([x for y in r for x in y])) < 1e-12
    print(right(make(0)["ranks"]))

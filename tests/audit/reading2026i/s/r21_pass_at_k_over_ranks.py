"""Unbiased pass@k (Chen et al. 2021) when the samples of one problem lie on several ranks: the correct and total counts per problem are added over ranks first, then 1 - C(n-c, k)/C(n, k) per problem, then the mean over PROBLEMS (not over samples or ranks). It is exactly 1 when n - c < k, and no sample is
ever grouped into tries of k, so a value per rank cannot be averaged to it."""
import math

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over ranks of lists of (problem id, correct 0/1), one entry per sample; problems may be spread over ranks, and have different numbers of samples"}
SETTINGS = {"k": "tries, 3"}
NOTES = "Mean over the problems that have at least k samples in all; others are left out. Problems weigh the same whatever their number of samples."


def make(seed):
    import random
    r = random.Random(seed)
    ranks = [[] for _ in range(3)]
    for problem in range(8):
        p = r.random()
        for _ in range(r.randrange(2, 9)):
            ranks[r.randrange(3)].append((problem, int(r.random() < p)))
    return {"ranks": ranks}


def right(ranks, k=3):
    total, correct = {}, {}
    for rank in ranks:                                   # gather of the counts
        for problem, ok in rank:
            total[problem] = total.get(problem, 0) + 1
            correct[problem] = correct.get(problem, 0) + ok
    values = []
    for problem in sorted(total):
        n, c = total[problem], correct[problem]
        if n < k:
            continue
        miss = 1.0
        for i in range(n - c + 1, n + 1):               # product form, as in the paper
            miss *= 1.0 - k / i
        values.append(1.0 if n - c < k else 1.0 - miss)
    return sum(values) / len(values)


def single_process(ranks, k=3):
    from itertools import combinations
    problems = {}
    for problem, ok in (s for rank in ranks for s in rank):
        problems.setdefault(problem, []).append(ok)
    v = [sum(any(c) for c in combinations(oks, k)) / math.comb(len(oks), k) for oks in problems.values() if len(oks) >= k]
    return sum(v) / len(v)


if __name__ == "__main__":
    for seed in range(5):
        d = make(seed)
        assert abs(right(**d) - single_process(**d)) < 1e-9
    print("pass@3", right(**make(0)), "by all subsets", single_process(**make(0)))

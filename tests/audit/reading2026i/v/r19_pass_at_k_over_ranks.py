"""Unbiased pass@k over ranks. Chen et al. 2021: from n samples with c right ones, pass@k = 1 - C(n-c, k) / C(n, k), per
problem, then the mean over problems. It is no function of the accuracy's mean. The samples of a problem are spread over
ranks, so the counts (n, c) per problem are summed over ranks before the formula, never the estimates."""
import random

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a list of (problem id, 1 if the sample is right else 0)"}
SETTINGS = {"k": "k of pass@k, 4; every problem needs at least k samples in total"}
NOTES = ("Mean over problems of the unbiased estimate. Problems may have unequal numbers of samples and count alike. A rank "
         "may hold any part of a problem's samples, or none.")


def make(seed):
    r = random.Random(seed)
    samples = [(p, int(r.random() < 0.15 * (p % 4))) for p in range(6) for _ in range(6 + p % 3)]
    r.shuffle(samples)
    return {"per_rank": [samples[0:12], samples[12:20], samples[20:]], "k": 4}


def estimate(n, c, k):
    if n - c < k:
        return 1.0
    miss = 1.0
    for i in range(n - c + 1, n + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss


def right(per_rank, k=4):
    tables = []
    for samples in per_rank:                            # local counts
        t = {}
        for problem, ok in samples:
            n, c = t.get(problem, (0, 0))
            t[problem] = (n + 1, c + ok)
        tables.append(t)
    merged = {}
    for t in tables:                                    # all-gather, then sum per problem
        for problem, (n, c) in t.items():
            a, b = merged.get(problem, (0, 0))
            merged[problem] = (a + n, b + c)
    return sum(estimate(n, c, k) for n, c in merged.values()) / len(merged)


def single_process(per_rank, k=4):
    from itertools import combinations
    by = {}
    for samples in per_rank:
        for problem, ok in samples:
            by.setdefault(problem, []).append(ok)
    per = []
    for oks in by.values():
        picks = list(combinations(oks, k))
        per.append(sum(any(x) for x in picks) / len(picks))
    return sum(per) / len(per)


if __name__ == "__main__":
    d = make(0)
    print(right(**d), single_process(**d))
    assert abs(right(**d) - single_process(**d)) < 1e-9 and 0 < right(**d) < 1

"""pass@k by the unbiased estimator, gathered over ranks (Chen et al., arXiv 2107.03374). For a problem with n samples, c correct: 1 - C(n-c, k) / C(n, k), as a product. The samples of one problem may lie on several ranks, so counts (not rates) are summed per problem first; a problem with n - c < k is 1 even if most samples fail. The mean over problems is not weighted by n."""
import math
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a list of (problem id, correct 0/1) pairs; samples of one problem may be on several ranks"}
SETTINGS = {"k": "3"}
NOTES = "Mean over problems (each counted once) of the unbiased pass@3. Every problem has at least 3 samples in total, numbers differ."


def make(seed):
    rng = random.Random(seed)
    ranks = [[] for _ in range(3)]
    for p in range(6):
        rate = rng.random() * 0.6
        for _ in range(rng.randint(4, 9)):
            ranks[rng.randrange(3)].append((p, int(rng.random() < rate)))
    return {"ranks": ranks}


def right(ranks, k=3):
    count = {}
    for pairs in ranks:                                        # gather of (problem, n, c)
        for p, ok in pairs:
            n, c = count.get(p, (0, 0))
            count[p] = (n + 1, c + ok)
    total = 0.0
    for n, c in count.values():
        if n - c < k:
            total += 1.0
        else:
            miss = 1.0
            for i in range(n - c + 1, n + 1):
                miss *= 1.0 - k / i
            total += 1.0 - miss
    return total / len(count)


def single(pairs, k=3):
    """The twin in one process: all subsets of k samples are tried."""
    import itertools
    by = {}
    for p, ok in pairs:
        by.setdefault(p, []).append(ok)
    val = []
    for v in by.values():
        sets = list(itertools.combinations(v, k))
        val.append(sum(any(s) for s in sets) / len(sets))
    return sum(val) / len(val)


if __name__ == "__main__":
    r = make(0)["ranks"]
    one = single([x for rank in r for x in rank])
    print(right(r), one); assert abs(right(r) - one) < 1e-9

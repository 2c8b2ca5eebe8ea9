"""Reward standard deviation over ranks by merging (count, mean, M2) with the formula of Chan et al. The mean within a rank is subtracted before squares are summed and the drift between ranks
is put back afterwards; ranks with no sample are legal. No averaging of standard deviations, no sum of raw squares."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of lists of rewards, of different length, some may be empty"}
SETTINGS = {}
NOTES = ("Result: sample standard deviation (divisor n - 1) of all rewards together, 0.0 if fewer than two. Stable for rewards with a large common offset. Any number of ranks. single() is the twin.")
import math
import random


def make(seed):
    r = random.Random(seed)
    return {"per_rank": [[1e6 + r.gauss(k, 1) for _ in range(r.choice([0, 1, 3, 8]))] for k in range(5)]}


def single(values):
    if len(values) < 2:
        return 0.0
    m = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - 1))


def local(values):
    n = len(values)
    if n == 0:
        return 0, 0.0, 0.0
    m = math.fsum(values) / n
    return n, m, math.fsum((v - m) ** 2 for v in values)


def right(per_rank):
    n, mean, m2 = 0, 0.0, 0.0
    for k, mk, m2k in map(local, per_rank):
        if k == 0:
            continue
        gap, both = mk - mean, n + k
        m2 += m2k + gap * gap * n * k / both
        mean += gap * k / both
        n = both
    return math.sqrt(m2 / (n - 1)) if n > 1 else 0.0


if __name__ == "__main__":
    worst = 0.0
    for seed in range(50):
        per = make(seed)["per_rank"]
        worst = max(worst, abs(right(per) - single([v for p in per for v in p])))
    print("largest difference to one process %.2e" % worst)
    assert worst < 1e-7 and right([[], [3.0]]) == 0.0

"""pass@k from n > k samples per problem, unbiased: 1 - C(n - c, k) / C(n, k), in a product form that does not overflow. It
is not the share of correct samples, nor 1 - (1 - c/n)**k, and a problem with n - c < k counts as 1 exactly. Problems are
scattered over ranks, may have different n, and each problem weighs the same, so ranks with more problems weigh more."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list of one list per rank of (n, c): samples and correct samples of a problem, n >= k"}
SETTINGS = {"k": "tries, 4"}
NOTES = ("Mean over the problems of all ranks. Twin: the same function with one rank that holds all problems.")
import itertools
import random


def make(seed):
    rng = random.Random(seed)
    ranks = []
    for problems in (5, 2, 4):
        row = []
        for _ in range(problems):
            n = rng.randrange(4, 9)
            row.append((n, rng.randrange(0, n + 1)))
        ranks.append(row)
    return {"ranks": ranks}


def _one(n, c, k):
    if n - c < k:
        return 1.0
    fail = 1.0
    for i in range(n - c + 1, n + 1):
        fail *= 1.0 - k / i
    return 1.0 - fail


def right(ranks, k=4):
    sums = [(sum(_one(n, c, k) for n, c in row), len(row)) for row in ranks]          # per rank
    return sum(s for s, _ in sums) / sum(m for _, m in sums)                          # all-reduce of both


if __name__ == "__main__":
    data = make(0)
    slow = []
    for n, c in itertools.chain(*data["ranks"]):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), 4))
        slow.append(sum(any(s) for s in subsets) / len(subsets))
    print(right(**data), sum(slow) / len(slow))
    assert abs(right(**data) - sum(slow) / len(slow)) < 1e-12

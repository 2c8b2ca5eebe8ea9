"""pass@k by 1 - C(n-c, k) / C(n, k) per problem, then the mean over problems.
Chen et al. 2021 (Codex, arXiv 2107.03374). It needs n >= k samples and uses all of them, not the first k; 1 - (1 - c/n)^k would be biased. Computed as a product so that no large binomials appear; it is 1 exactly when fewer than k samples
are wrong. Problems have different n. The mean is over problems of all ranks, so ranks with more problems weigh more."""
import math
import random

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of lists of (n samples, c correct), one pair per problem"}
SETTINGS = {"k": "5"}
NOTES = "Each problem counts once, whatever its n; problems of all ranks are averaged together. n >= k for all problems. A rank may have no problem. `single` is the one-process twin."


def make(seed):
    rng = random.Random(seed)
    per_rank = []
    for problems in (7, 2, 0, 5):
        ns = [rng.choice([5, 8, 16]) for _ in range(problems)]
        per_rank.append([(n, rng.randint(0, n // 2 if rng.random() < 0.8 else n)) for n in ns])
    return {"per_rank": per_rank}


def _one(n, c, k):
    if n - c < k:
        return 1.0
    p = 1.0
    for i in range(n - c + 1, n + 1):
        p *= 1 - k / i
    return 1 - p


def single(problems, k=5):
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in problems) / len(problems)


def right(per_rank, k=5):
    total, count = 0.0, 0
    for problems in per_rank:
        total, count = total + sum(_one(n, c, k) for n, c in problems), count + len(problems)
    return total / count


if __name__ == "__main__":
    d = make(0)["per_rank"]
    one = single([p for r in d for p in r])
    print("ranks", right(d), "single", one)
    assert abs(right(d) - one) < 1e-9

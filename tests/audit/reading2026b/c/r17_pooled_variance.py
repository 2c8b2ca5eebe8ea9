"""Standard deviation of rewards over ranks from merged moments. Each rank sends count, mean and sum of squared deviations from its own mean; the merge adds the between-rank term n_a n_b / (n_a + n_b) * delta squared (Chan). The result is the unbiased
standard deviation of the pooled rewards. It is not the mean of the ranks' deviations, and the merge has no sum of squares."""
import random
import statistics

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "rewards of the samples on each rank; different numbers, at least one rank with one sample only"}
SETTINGS = {}
NOTES = "Unbiased (n - 1) standard deviation of all rewards of all ranks. Rewards may be large with a small spread. The single-process twin is `single`."


def make(seed):
    r = random.Random(seed)
    return {"per_rank": [[1e6 + r.gauss(k, 1) for _ in range(n)] for k, n in enumerate((5, 1, 8, 3))]}


def right(per_rank):
    n, mean, m2 = 0, 0.0, 0.0
    for x in per_rank:
        if not x:
            continue
        k, mu = len(x), sum(x) / len(x)
        delta = mu - mean
        m2 += sum((v - mu) ** 2 for v in x) + delta * delta * n * k / (n + k)
        mean += delta * k / (n + k)
        n += k
    return (m2 / (n - 1)) ** 0.5


def single(per_rank):
    return statistics.stdev([v for x in per_rank for v in x])


if __name__ == "__main__":
    d = make(0)
    print("over ranks", right(**d), "single process", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-6

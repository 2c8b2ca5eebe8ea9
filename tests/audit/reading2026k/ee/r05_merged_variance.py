"""Standard deviation over ranks by merging (count, mean, sum of squared deviations). Chan et al. 1979; Welford; running statistics of RL libraries (OpenAI baselines, Megatron, DeepSpeed-Chat).
Ranks do not send their values; each sends n, mean and M2, which are merged pairwise with the term delta^2 * n_a * n_b / (n_a + n_b). No variance of a rank is ever averaged, and ranks can be empty."""
import math
import random

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"parts": "list with one list of rewards (floats) per rank; ranks have different numbers of them, some none"}
SETTINGS = {}
NOTES = "sample standard deviation (divided by n - 1) of the rewards of all ranks together; 0.0 for fewer than two rewards."


def make(seed):
    rng = random.Random(seed)
    return {"parts": [[rng.gauss(1.5 * r, 0.5) for _ in range(n)] for r, n in enumerate((3, 0, 6, 1))]}


def local(values):
    n = len(values)
    mean = sum(values) / n if n else 0.0
    return n, mean, sum((v - mean) ** 2 for v in values)


def merge(a, b):
    n = a[0] + b[0]
    if n == 0:
        return a
    delta = b[1] - a[1]
    return n, a[1] + delta * b[0] / n, a[2] + b[2] + delta * delta * a[0] * b[0] / n


def right(parts):
    state = (0, 0.0, 0.0)
    for values in parts:
        state = merge(state, local(values))
    return math.sqrt(state[2] / (state[0] - 1)) if state[0] > 1 else 0.0


if __name__ == "__main__":
    import statistics
    case = make(0)
    ref = statistics.stdev([v for p in case["parts"] for v in p])
    print(right(**case), ref)
    assert abs(right(**case) - ref) < 1e-12

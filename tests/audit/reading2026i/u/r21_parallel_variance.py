"""Standard deviation over ranks by Chan's merge (Welford / Chan et al. 1979; used for running return statistics). Each rank keeps (count, mean, sum of squared deviations); merging adds a term delta^2 * n_a * n_b / (n_a + n_b) for the distance of the means. No raw squares are summed, and the local deviations alone do not add up."""
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a 1-D tensor of episode returns, sizes differ, may be empty"}
SETTINGS = {}
NOTES = "Unbiased standard deviation (n - 1) of all returns of all ranks together. At least two values in total. Values may be far from zero (about 1000), which is why squares are not summed. Double precision."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [1000 + i * 0.7 + torch.randn(n, generator=g, dtype=torch.float64) for i, n in enumerate((5, 1, 0, 8))]}


def right(ranks):
    n, mean, m2 = 0, 0.0, 0.0
    for x in ranks:                                            # all-gather of three numbers per rank
        b = x.numel()
        if b == 0:
            continue
        mb = x.mean().item()
        sb = ((x - mb) ** 2).sum().item()
        delta = mb - mean
        m2 = m2 + sb + delta * delta * n * b / (n + b)
        mean = mean + delta * b / (n + b)
        n = n + b
    return (m2 / (n - 1)) ** 0.5


def single(values):
    """The twin in one process."""
    return values.std(unbiased=True).item()


if __name__ == "__main__":
    r = make(0)["ranks"]
    print(right(r), single(torch.cat(r))); assert abs(right(r) - single(torch.cat(r))) < 1e-9

"""Variance over ranks by Chan's merge. The reward variance of the whole job is not the mean of the ranks' variances: the means' differences enter with the factor
n_a n_b / (n_a + n_b). Ranks have different numbers of samples and some none at all; the sums of squares are never formed (no cancellation for large means)."""
import torch

FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list with one 1-D float tensor per rank (perhaps empty)"}
SETTINGS = {}
NOTES = "Unbiased variance (n - 1) of all samples of all ranks. Works for any number and sizes of ranks, in any order; fewer than two samples in all give 0. Twin: single(all samples)."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [1000 + torch.randn(n, generator=g) * (i + 1) for i, n in enumerate([5, 0, 3, 1])]}


def single(samples):
    return samples.double().var(unbiased=True).item() if len(samples) > 1 else 0.0


def right(ranks):
    n, mean, m2 = 0, 0.0, 0.0
    for x in ranks:
        k = len(x)
        if k == 0:
            continue
        x = x.double()
        mu = x.mean().item()
        part = (x - mu).square().sum().item()
        delta = mu - mean
        m2 += part + delta * delta * n * k / (n + k)
        mean += delta * k / (n + k)
        n += k
    return m2 / (n - 1) if n > 1 else 0.0


if __name__ == "__main__":
    for seed in range(4):
        r = make(seed)["ranks"]
        print(right(r), single(torch.cat(r))); assert abs(right(r) - single(torch.cat(r))) < 1e-9 and abs(right(r[::-1]) - right(r)) < 1e-9

"""Standard deviation over ranks from per-rank (count, mean, M2) by Chan's merge: the between-rank term n_a*n_b/n*(difference of means)^2 is added, and the mean of per-rank deviations is never taken. A rank may have no samples (Chan et al. 1979; used by whitening of advantages over ranks)."""
import torch

FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of a tensor of values, lengths differ, some empty"}
SETTINGS = {}
NOTES = "Returns the sample standard deviation (divides by n - 1) over all values of all ranks, in float64. Any number of ranks; at least two values in all. Order of ranks does not matter up to rounding."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [torch.randn(n, generator=g) * 2 + 1000 + k for k, n in enumerate((5, 0, 1, 9))]}


def local(x):
    x = x.double()
    n = x.numel()
    mean = x.mean() if n else x.new_zeros(())
    return n, mean, (x - mean).square().sum()


def right(per_rank):
    n, mean, m2 = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for k, mu, q in map(local, per_rank):                    # in reality: all_gather of three numbers
        if k == 0:
            continue
        delta, tot = mu - mean, n + k
        m2 = m2 + q + delta.square() * n * k / tot
        mean = mean + delta * k / tot
        n = tot
    return float((m2 / (n - 1)).sqrt())


def single_process(per_rank):
    return float(torch.cat(per_rank).double().std())


if __name__ == "__main__":
    for s in range(10):
        x = make(s)["per_rank"]
        assert abs(right(x) - single_process(x)) < 1e-9
    naive = sum(float(v.std(unbiased=False)) for v in x if len(v)) / 3
    print("ok", right(x), single_process(x), "mean of deviations would be", naive)

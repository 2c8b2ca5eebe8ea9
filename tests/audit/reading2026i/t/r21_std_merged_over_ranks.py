"""Standard deviation over ranks by merging count, mean and squared deviations. Chan et al. 1979; torchmetrics, running reward normalizers.
Ranks send (n, mean, M2). The merged M2 adds n_a*n_b/(n_a+n_b)*(difference of means)^2, so the result is larger than any mean of per-rank deviations. The divisor is n-1 of ALL samples; ranks with one or no sample take part although they have no deviation of their own."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "one tensor of rewards per rank, [samples]; lengths differ, may be 0 or 1"}
SETTINGS = {}
NOTES = "Sample standard deviation (divisor n-1) of all rewards of all ranks. Fewer than two samples in total: 0. Single-process twin: single(all rewards). Order of ranks does not matter up to rounding."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"ranks": [torch.randn(n, generator=g) + k for k, n in enumerate((6, 1, 0, 11, 2))]}

def right(ranks):
    n, mean, m2 = 0, 0.0, 0.0
    for x in ranks:
        nb = x.numel()
        if nb == 0:
            continue
        mb = x.double().mean().item(); sb = (x.double() - mb).pow(2).sum().item()
        d, t = mb - mean, n + nb
        mean, m2, n = mean + d * nb / t, m2 + sb + d * d * n * nb / t, t
    return (m2 / (n - 1)) ** 0.5 if n > 1 else 0.0

def single(x):
    return x.double().std().item()

if __name__ == "__main__":
    r = make(0)["ranks"]; print(right(r), single(torch.cat(r))); assert abs(right(r) - single(torch.cat(r))) < 1e-9
    assert abs(right(r[::-1]) - right(r)) < 1e-9

"""Standard deviation over ranks by merging moments (Chan et al. 1983). Each rank sends (count, mean, M2); the ranks have different counts and some have none. Averaging the ranks'
standard deviations would be wrong; the between-rank term delta^2 * n_a n_b / n is what looks superfluous."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list (one per rank) of 1-D tensors of rewards, possibly empty"}
SETTINGS = {}
NOTES = "Unbiased (n-1) standard deviation of all values together; any number of ranks, any counts, at least two values in all. Order of ranks does not matter up to rounding. Twin: torch.cat(per_rank).std()."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [1000 + k + torch.randn(n, generator=g, dtype=torch.float64) for k, n in enumerate((5, 0, 1, 8))]}


def single(per_rank):
    return torch.cat(per_rank).std().item()


def right(per_rank):
    packets = [(x.numel(), x.mean().item(), (x - x.mean()).square().sum().item()) if x.numel() else (0, 0.0, 0.0) for x in map(torch.Tensor.double, per_rank)]
    n, mean, m2 = 0, 0.0, 0.0
    for nb, mb, sb in packets:                 # what an all-gather of three numbers per rank would see
        if nb == 0:
            continue
        delta, tot = mb - mean, n + nb
        mean += delta * nb / tot
        m2 += sb + delta * delta * n * nb / tot
        n = tot
    return (m2 / (n - 1)) ** 0.5


if __name__ == "__main__":
    for s in range(5):
        d = make(s); assert abs(right(**d) - single(**d)) < 1e-9
        assert abs(right(d["per_rank"][::-1]) - single(**d)) < 1e-9
    print("ok", right(**d))

"""Standard deviation of rewards over ranks from counts, means and squared deviations (Chan's formula).
No rank sends its rewards. The result is neither the mean of the per-rank deviations nor computed with the local counts minus
one; ranks with one or no reward take part with a deviation of 0."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list with one dict per rank: 'rewards' [n], n differs and can be 0"}
SETTINGS = {}
NOTES = "Standard deviation (n - 1) of the rewards of all ranks; equal to one process with all rewards."

def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [{"rewards": torch.randn(n, generator=g, dtype=torch.float64) + i} for i, n in enumerate((5, 1, 0, 9))]}

def right(per_rank):
    n, mean, m2 = 0, 0.0, 0.0
    for r in per_rank:
        k = len(r["rewards"])
        if k == 0:
            continue
        local = r["rewards"].mean().item()
        local_m2 = ((r["rewards"] - local) ** 2).sum().item()
        delta = local - mean
        m2 += local_m2 + delta ** 2 * n * k / (n + k)
        mean += delta * k / (n + k)
        n += k
    return (m2 / (n - 1)) ** 0.5

def single(per_rank):
    return torch.cat([r["rewards"] for r in per_rank]).std().item()

if __name__ == "__main__":
    d = make(0)
    print(right(**d), "one process:", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-9

"""Standard deviation merged over ranks. Reward and return normalisers (VecNormalize, RunningMeanStd, the Chan/Welford merge)
do not average the ranks' deviations: each rank keeps count, mean and the sum of squared deviations M2, and merging adds
the term delta^2 * n_a * n_b / n for the distance between the means. An empty rank is harmless."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks; each a 1-d tensor of rewards, of any length, also 0"}
SETTINGS = {}
NOTES = ("Population standard deviation (divided by n, not n - 1) over all rewards of all ranks, in float64. Ranks may have "
         "very different means and sizes. At least one reward in total.")


def make(seed):
    torch.manual_seed(seed)
    return {"per_rank": [torch.randn(5) + 3, torch.randn(11) * 2 - 1, torch.empty(0), torch.randn(1)]}


def merge(a, b):
    (na, ma, sa), (nb, mb, sb) = a, b
    n = na + nb
    if n == 0:
        return a
    delta = mb - ma
    return n, ma + delta * nb / n, sa + sb + delta ** 2 * na * nb / n


def right(per_rank):
    state = (0, 0.0, 0.0)
    for x in per_rank:
        x = x.double()
        if len(x) == 0:
            local = (0, 0.0, 0.0)
        else:
            mean = x.mean().item()
            local = (len(x), mean, ((x - mean) ** 2).sum().item())
        state = merge(state, local)
    return (state[2] / state[0]) ** 0.5


def single_process(per_rank):
    return torch.cat(list(per_rank)).double().std(unbiased=False).item()


if __name__ == "__main__":
    d = make(0)
    print(right(**d), single_process(**d), right(d["per_rank"][::-1]))
    assert abs(right(**d) - single_process(**d)) < 1e-9

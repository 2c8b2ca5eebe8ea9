"""Standard deviation of the reward over ranks by Chan's merge of (count, mean, M2). Chan, Golub & LeVeque 1979; used by running reward normalisers (stable-baselines3 RunningMeanStd, DeepSpeed-Chat, gymnasium).
The merged M2 has a term delta^2 * n_a * n_b / n besides the two M2. A rank without a sample is skipped by itself through n = 0. The result is the unbiased standard deviation over all samples, not the mean of the ranks' deviations."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"rewards": "list over ranks of 1-d reward tensors of unequal length, possibly empty; at least 2 samples in all"}
SETTINGS = {}
NOTES = "Unbiased standard deviation (n - 1) over all samples of all ranks. Computed in float64. Single-process twin: torch.cat(...).std(). The order of the ranks does not matter beyond rounding. Any number of ranks."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rewards": [1000 + 3 * i + torch.randn(n, generator=g) for i, n in enumerate((5, 0, 1, 8))]}


def single(rewards):
    return torch.cat(rewards).double().std().item()


def right(rewards):
    n, mean, m2 = 0, 0.0, 0.0
    for r in rewards:
        r = r.double()
        k = r.numel()
        if k == 0:
            continue
        mk = r.mean().item()
        m2k = (r - mk).pow(2).sum().item()
        delta = mk - mean
        m2 += m2k + delta * delta * n * k / (n + k)
        mean += delta * k / (n + k)
        n += k
    return (m2 / (n - 1)) ** 0.5


if __name__ == "__main__":
    r = make(0)["rewards"]
    print(right(r), single(r))
    assert abs(right(r) - single(r)) < 1e-6 and abs(right(r[::-1]) - single(r)) < 1e-6

"""Standard deviation over ranks by Chan's parallel merge (count, mean, M2), as in running normalisers of RL libraries (OpenAI baselines RunningMeanStd, stable-baselines3). No square of sums is formed; the merge term with delta^2 looks like a double count."""
import torch

FAMILY = "metrics over ranks or micro-batches"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one 1-d tensor of rewards per rank; lengths differ and may be 0 on some ranks; at least two rewards in all"}
SETTINGS = {}
NOTES = ("Sample standard deviation (Bessel, n-1) of the rewards of all ranks together. Each rank gives (n, mean, M2 = sum of squared deviations from its own mean); empty ranks give (0, 0, 0). Two triples merge with delta = mean_b - mean_a: "
         "mean = mean_a + delta*n_b/n, M2 = M2_a + M2_b + delta^2*n_a*n_b/n. The twin is torch.std of the concatenation. Constants only; any number of ranks.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"per_rank": [torch.randn(n, generator=g, dtype=torch.float64) + 100 * k for k, n in enumerate((5, 0, 3, 1))]}


def right(per_rank):
    n, mean, m2 = 0, 0.0, 0.0
    for x in per_rank:
        nb = x.numel()
        if nb == 0:
            continue
        mb = x.mean().item()
        m2b = ((x - mb) ** 2).sum().item()
        delta = mb - mean
        tot = n + nb
        mean += delta * nb / tot
        m2 += m2b + delta ** 2 * n * nb / tot
        n = tot
    return (m2 / (n - 1)) ** 0.5


def twin(per_rank):
    return torch.cat(per_rank).std().item()


if __name__ == "__main__":
    print(right(**make(0)), twin(**make(0)))

"""Perplexity is the exponential of pooled sums, and some ranks have nothing. Each rank gives the sum of negative log-probabilities and the number of tokens, both as float64; a rank without tokens gives (0, 0), not a perplexity of 1. The exponential is
taken once at the end, so the result is not any mean of the ranks' perplexities."""
import math
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one list per rank of (negative log-probabilities of the tokens of a batch, mask with 1 on counted tokens); lists may be empty and masks all zero"}
SETTINGS = {}
NOTES = "exp(sum of counted negative log-probabilities of all ranks / number of counted tokens of all ranks). The single-process twin is `single`."


def make(seed):
    torch.manual_seed(seed)
    row = lambda n, p: (torch.rand(2, n) * 6, (torch.rand(2, n) < p).float())
    return {"per_rank": [[row(6, 0.9), row(3, 0.5)], [], [row(8, 0.0)], [row(4, 1.0)]]}


def right(per_rank):
    sums = []
    for batches in per_rank:
        s = torch.zeros(2, dtype=torch.float64)
        for nll, mask in batches:
            s += torch.stack([(nll.double() * mask).sum(), mask.double().sum()])
        sums.append(s)
    total = torch.stack(sums).sum(0)                   # all_reduce SUM
    return math.exp(total[0] / total[1])


def single(per_rank):
    tokens = [x for batches in per_rank for nll, mask in batches for x, m in zip(nll.flatten().tolist(), mask.flatten().tolist()) if m]
    return math.exp(sum(tokens) / len(tokens))


if __name__ == "__main__":
    d = make(0)
    print("over ranks", right(**d), "single process", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-6

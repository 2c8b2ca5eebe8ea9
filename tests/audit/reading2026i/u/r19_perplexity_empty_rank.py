"""Perplexity over ranks with an empty rank. Every rank sends (sum of nats, tokens); a rank whose evaluation shard has run out sends (0, 0) and still takes part, as the collective needs it. The perplexity is exp(sum / tokens) once at the end, clipped at exp(20) as nanoGPT/Megatron do. It is neither the mean of the ranks' perplexities nor the mean of their losses."""
import math
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "per rank a list of batches, each a 1-D tensor of token losses in nats; the list may be empty"}
SETTINGS = {}
NOTES = "exp(min(20, mean loss over all tokens of all ranks)). At least one rank has tokens. Sums in double precision."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    size = lambda: int(torch.randint(2, 9, (), generator=g))
    return {"ranks": [[torch.rand(size(), generator=g) * 6 for _ in range(n)] for n in (3, 1, 0, 2)]}


def right(ranks):
    total = torch.zeros(2, dtype=torch.float64)
    for batches in ranks:
        local = torch.zeros(2, dtype=torch.float64)
        for b in batches:
            local += torch.tensor([b.double().sum().item(), float(b.numel())], dtype=torch.float64)
        total += local                                          # all-reduce sum
    return math.exp(min(20.0, (total[0] / total[1]).item()))


def single(losses):
    """The twin in one process: all token losses in one tensor."""
    return math.exp(min(20.0, losses.double().mean().item()))


if __name__ == "__main__":
    r = make(0)["ranks"]
    one = single(torch.cat([b for rank in r for b in rank]))
    print(right(r), one); assert abs(right(r) - one) < 1e-9

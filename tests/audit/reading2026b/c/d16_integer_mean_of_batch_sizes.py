"""Mean over ranks of an integer count is floored. Lightning-AI/pytorch-lightning#21859, https://github.com/Lightning-AI/pytorch-lightning/issues/21859, 2026.
An epoch metric keeps the weighted sum of values as a float and the number of samples as an int64 tensor, and synchronises both with a mean over ranks before dividing.
The mean of an integer tensor is stored back into an integer tensor and loses its fraction. Whenever ranks have unequal counts, every metric came out too large by the same factor."""
import random
import torch

FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "one list per rank of (value of the batch, number of samples in the batch)"}
SETTINGS = {}
NOTES = "Mean of the metric over all samples of all ranks. Ranks may have different numbers of samples. The single-process twin is `single`."


def make(seed):
    r = random.Random(seed)
    per_rank = [[(r.random() * 3, r.randrange(1, 5)) for _ in range(n)] for n in (3, 2, 2)]
    while sum(n for b in per_rank for _, n in b) % 3 == 0:
        per_rank[0].append((r.random() * 3, r.randrange(1, 5)))
    return {"per_rank": per_rank}


def accumulate(batches):
    value, count = torch.tensor(0.0), torch.tensor(0)
    for v, n in batches:
        value += v * n
        count += n
    return value, count


def all_reduce_mean(tensors):
    out = [t.clone() for t in tensors]
    total = sum(out)
    for t in out:
        t.copy_(total / len(out))
    return out[0]


def broken(per_rank):
    values, counts = zip(*(accumulate(b) for b in per_rank))
    return float(all_reduce_mean(values) / all_reduce_mean(counts))


def right(per_rank):
    values, counts = zip(*(accumulate(b) for b in per_rank))
    return float(all_reduce_mean(values) / all_reduce_mean([c.float() for c in counts]))


def single(per_rank):
    rows = [x for b in per_rank for x in b]
    return sum(v * n for v, n in rows) / sum(n for _, n in rows)


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(**d), "right", right(**d), "single process", single(**d))
    assert abs(right(**d) - single(**d)) < 1e-5 and abs(broken(**d) - single(**d)) > 1e-3

"""Perplexity over ranks with an evaluation sampler that repeats samples. The distributed sampler pads the last round by wrapping around to the first samples; after interleaving the ranks' results round by round, everything past the true size is thrown away (accelerate's gather_for_metrics). The exponential comes after the global division: not a mean of rank perplexities."""
FAMILY = "sharding"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list over ranks of lists of (summed nll, token count), one per sample, in the order rank, rank + W, …", "total": "true number of samples"}
SETTINGS = {}
NOTES = "All ranks have the same number of entries (the sampler pads). right(per_rank, total) -> perplexity, twin(samples) is the single-process value. Samples weigh by tokens."
import math
import random


def twin(samples):
    return math.exp(sum(s for s, _ in samples) / sum(n for _, n in samples))


def shard(samples, world):
    padded = [samples[i % len(samples)] for i in range(-(-len(samples) // world) * world)]
    return [padded[r::world] for r in range(world)]


def make(seed):
    r = random.Random(seed)
    samples = [(n * r.uniform(1, 4), n) for n in (r.randint(1, 20) for _ in range(10))]
    return {"per_rank": shard(samples, 4), "total": len(samples)}


def right(per_rank, total):
    gathered = [x for round_ in zip(*per_rank) for x in round_][:total]
    return math.exp(math.fsum(s for s, _ in gathered) / sum(n for _, n in gathered))


if __name__ == "__main__":
    b = make(0)
    r = random.Random(0)
    samples = [(n * r.uniform(1, 4), n) for n in (r.randint(1, 20) for _ in range(10))]
    print(right(**b), twin(samples), "with the repeats", right(b["per_rank"], 12))
    assert abs(right(**b) - twin(samples)) < 1e-9
    for w in range(1, 13):
        assert abs(right(shard(samples, w), 10) - twin(samples)) < 1e-9

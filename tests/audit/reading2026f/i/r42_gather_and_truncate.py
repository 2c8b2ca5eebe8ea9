"""Evaluation with a wrapping sampler (torch DistributedSampler, accelerate's gather_for_metrics). Every rank must run the same number of batches, so the sampler repeats samples from the start;
after the gather the rows are INTERLEAVED back and the tail beyond the data set's length is thrown away. Dropping results is what makes the number right."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"per_rank": "list (one per rank) of 0/1 tensors, all of the same length; rank r holds samples r, r+world, r+2*world, ... with wrap-around", "size": "true number of samples"}
SETTINGS = {}
NOTES = "Accuracy over the `size` true samples. All ranks have ceil(size/world) entries. Samples are assigned round robin, hence stack on dim 1. Twin: mean of the un-sharded results. size is a legal number not divisible by world."
import torch


def shard(results, world):
    n = -(-len(results) // world) * world
    wrapped = torch.cat([results, results[: n - len(results)]])
    return [wrapped[r::world] for r in range(world)]


def make(seed):
    g = torch.Generator().manual_seed(seed)
    size = 9 + seed % 5
    return {"per_rank": shard((torch.rand(size, generator=g) < 0.6).float(), 4), "size": size}


def single(results):
    return results.mean().item()


def right(per_rank, size):
    return torch.stack(per_rank, 1).flatten()[:size].mean().item()


if __name__ == "__main__":
    for s in range(10):
        g = torch.Generator().manual_seed(s); full = (torch.rand(9 + s % 5, generator=g) < 0.6).float()
        assert abs(right(**make(s)) - single(full)) < 1e-7
    print("ok", right(**make(3)))

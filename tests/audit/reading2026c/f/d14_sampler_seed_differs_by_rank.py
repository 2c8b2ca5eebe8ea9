"""Each rank shuffles with its own seed and then takes its slice. NVlabs/LongLive#71, https://github.com/NVlabs/LongLive/issues/71, 2026.
The seed given to DistributedSampler was multiplied by the rank. The slices of different permutations overlap: some rows are seen by several ranks in one epoch, others by none."""
import torch

FAMILY = "data stages"
KIND = "seeds"
INPUTS = {"rank": "data-parallel rank, 0 ... 3", "step": "step of the run; 16 steps are an epoch"}
SETTINGS = {"world": "ranks, 4", "rows": "rows of the dataset, 64; world divides it", "seed": "seed of the run, 1234"}
NOTES = "Returns the row index this rank reads at this step. Over the ranks and the steps of an epoch every row must come once; each epoch has a new order."

def make(seed):
    return {"rank": (2, 3, 0)[seed % 3], "step": 5 + seed % 8}

def index(rank, step, world, rows, sampler_seed):
    per_epoch = rows // world
    epoch, at = divmod(step, per_epoch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(sampler_seed + epoch))
    return int(order[rank::world][at])

def broken(rank, step, world=4, rows=64, seed=1234):
    return index(rank, step, world, rows, seed * rank)

def right(rank, step, world=4, rows=64, seed=1234):
    return index(rank, step, world, rows, seed)

if __name__ == "__main__":
    seen = {f.__name__: len({f(r, s) for r in range(4) for s in range(16)}) for f in (broken, right)}
    print("different rows in one epoch of 64:", seen)
    print("make(0): broken", broken(**make(0)), "right", right(**make(0)))
    assert seen["right"] == 64 and seen["broken"] < 60 and broken(**make(0)) != right(**make(0))

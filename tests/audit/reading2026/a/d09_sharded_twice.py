"""A loader that is already split by rank is split again. huggingface/accelerate#4199,
https://github.com/huggingface/accelerate/issues/4199, 2026. prepare() assumes that the loader shows the whole data set and
wraps its batch sampler once more; with a DistributedSampler in it each rank keeps 1/world of its own share. An epoch
covers only a part of the data, the loss curve looks normal and there is no warning."""
import random
FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "rank, 0 to world-1", "step": "step, from 0; the epoch starts again when the loader is exhausted"}
SETTINGS = {"world": "number of ranks, 4", "size": "samples in the data set, 64", "batch_size": "samples per rank and step, 2",
            "seed": "seed of the shuffle, the same on all ranks, 0"}
NOTES = "Returns the sample indices that a rank trains on at a step. In an epoch the ranks together see each sample once."

def make(seed):
    return {"rank": 1, "step": 2 + seed}

def _rank_sampler(rank, epoch, world, size, seed):
    order = list(range(size))
    random.Random(seed + epoch).shuffle(order)
    return order[rank::world]

def broken(rank, step, world=4, size=64, batch_size=2, seed=0):
    epoch = 0
    while True:
        local = _rank_sampler(rank, epoch, world, size, seed)
        batches = [local[i:i + batch_size] for i in range(0, len(local), batch_size)]
        batches = batches[rank::world]                 # what prepare() adds
        if step < len(batches):
            return batches[step]
        step, epoch = step - len(batches), epoch + 1

def right(rank, step, world=4, size=64, batch_size=2, seed=0):
    epoch = 0
    while True:
        local = _rank_sampler(rank, epoch, world, size, seed)
        batches = [local[i:i + batch_size] for i in range(0, len(local), batch_size)]
        if step < len(batches):
            return batches[step]
        step, epoch = step - len(batches), epoch + 1

if __name__ == "__main__":
    print(broken(**make(0)), right(**make(0)))
    seen = lambda f: len({i for rank in range(4) for step in range(8) for i in f(rank, step)})
    print("different samples in the 8 steps of an epoch:", seen(broken), seen(right))
    assert seen(broken) < 64 and seen(right) == 64

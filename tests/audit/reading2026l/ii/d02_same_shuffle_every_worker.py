"""Every (rank, worker) draws the same within-shard shuffle. dreamzero0/dreamzero#91, https://github.com/dreamzero0/dreamzero/issues/91, 2026.
The sharded loader seeded the shuffle of the samples inside a shard with the base seed alone, in every dataloader worker on every
rank. Two workers that get the same shard at the same position of the schedule (usual with few shards) emitted the same samples
in the same order, so the global batch held duplicates; nothing failed and the loss looked normal."""
import numpy as np

FAMILY = "sharding and reductions over ranks"
KIND = "seeds"
INPUTS = {"rank": "rank of the process, 0 .. world-1", "step": "how many samples this worker has already emitted"}
SETTINGS = {"worker": "dataloader worker of the rank, 0", "seed": "base seed, 7", "world": "number of ranks, 4",
            "num_workers": "workers per rank, 1", "n_shards": "number of shards, 3", "shard_size": "samples per shard, 64"}
NOTES = ("Returns (shard, index in the shard) of the sample number `step` of the worker. Which shard a worker reads is drawn (with "
         "replacement) from one schedule that all ranks compute identically from the base seed; worker number k = rank*num_workers+worker "
         "takes entries k, k+K, k+2K, … of it (K = world*num_workers). Each entry is read completely, in an order drawn by the worker's own "
         "generator. Several workers may hold the same shard at the same time; their orders are statistically independent streams, so that the "
         "samples of one global batch are independent draws. The result is deterministic in (rank, worker, step, seed).")


def make(seed):
    r = np.random.default_rng(seed)
    return {"rank": int(r.integers(4)), "step": int(r.integers(200))}


def _schedule(seed, k, K, n_shards, entry):
    return int(np.random.default_rng(seed).integers(0, n_shards, size=(entry + 1) * K)[entry * K + k])


def broken(rank, step, worker=0, seed=7, world=4, num_workers=1, n_shards=3, shard_size=64):
    k, K = rank * num_workers + worker, world * num_workers
    entry, i = divmod(step, shard_size)
    rng = np.random.default_rng(seed)
    for _ in range(entry + 1):
        order = rng.permutation(shard_size)
    return _schedule(seed, k, K, n_shards, entry), int(order[i])


def right(rank, step, worker=0, seed=7, world=4, num_workers=1, n_shards=3, shard_size=64):
    k, K = rank * num_workers + worker, world * num_workers
    entry, i = divmod(step, shard_size)
    rng = np.random.default_rng(seed + 100003 * (rank * num_workers + worker))
    for _ in range(entry + 1):
        order = rng.permutation(shard_size)
    return _schedule(seed, k, K, n_shards, entry), int(order[i])


if __name__ == "__main__":
    print("make(0)", make(0), broken(**make(0)), right(**make(0)))
    for f in (broken, right):
        d = sum(4 - len({f(r, s) for r in range(4)}) for s in range(64))
        print(f.__name__, "duplicates inside 64 global batches of 4:", d)

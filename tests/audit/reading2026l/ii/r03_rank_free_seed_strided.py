"""The sampler of torch's DistributedSampler and of infinite strided samplers (DINO, detectron2): every rank uses the same seed, shuffles the whole dataset identically, and takes every world-th entry. The seed must not contain the rank; the tail wraps around to the beginning of the permutation, so a few samples occur twice per epoch."""
import torch

FAMILY = "sharding and reductions over ranks"
KIND = "seeds"
INPUTS = {"rank": "rank of the process, 0 .. world-1", "step": "number of samples that the rank has already drawn in the run"}
SETTINGS = {"size": "samples in the dataset, 26", "world": "ranks, 4", "seed": "base seed, 5"}
NOTES = ("Returns the dataset index that the rank draws at this step. One epoch is ceil(size/world) steps per rank. In epoch e all ranks compute the same permutation of the dataset from seed+e, extend it by its own first entries to a multiple of "
         "world, and rank r takes entries r, r+world, … : the ranks' samples at one step are different, and one epoch covers every sample at least once; ceil(size/world)*world - size samples occur twice. The order is new in each epoch and deterministic.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rank": int(torch.randint(4, (1,), generator=g)), "step": int(torch.randint(40, (1,), generator=g))}


def right(rank, step, size=26, world=4, seed=5):
    per_rank = -(-size // world)
    epoch, i = divmod(step, per_rank)
    g = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(size, generator=g).tolist()
    order += order[: per_rank * world - size]
    return order[rank + i * world]


if __name__ == "__main__":
    from collections import Counter
    for e in range(3):
        c = Counter(right(r, e * 7 + i) for r in range(4) for i in range(7))
        print("epoch", e, "covered", len(c), "twice", sorted(k for k in c if c[k] == 2), "distinct per step", all(len({right(r, e * 7 + i) for r in range(4)}) == 4 for i in range(7)))
    from torch.utils.data import DistributedSampler
    s = DistributedSampler(range(26), num_replicas=4, rank=1, shuffle=True, seed=5); s.set_epoch(1)
    print("as torch:", list(s) == [right(1, 7 + i) for i in range(7)])

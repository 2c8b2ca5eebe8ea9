"""dataset_order="torch_randperm" shuffles once and repeats the order each epoch. unslothai/unsloth-zoo#830, https://github.com/unslothai/unsloth-zoo/pull/830 (review thread), 2026.
The preference path of the MLX trainer built one seeded permutation and cycled through it with batch_idx % len(batches)
when training ran over more than one pass. The text path reseeds the permutation each epoch. So with preference data
the batches had the same members in the same order in each epoch."""
import torch
FAMILY = "data stages"
KIND = "seeds"
INPUTS = {"rank": "data-parallel rank", "step": "micro-batch number since the start of training (from 0)"}
SETTINGS = {"n": "rows of the data set, 24", "batch": "rows per micro-batch and rank, 3", "world": "ranks, 2", "seed": "data seed, 3407"}
NOTES = ("Returns the row numbers that this rank reads in this micro-batch. Within an epoch each row is read once over all ranks; each epoch has its own order. "
         "n must be divisible by batch * world.")

def make(seed):
    return {"rank": seed % 2, "step": 4 + seed % 4}

def broken(rank, step, n=24, batch=3, world=2, seed=3407):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    per_epoch = n // (batch * world)
    a = (step % per_epoch) * batch * world + rank * batch
    return order[a:a + batch]

def right(rank, step, n=24, batch=3, world=2, seed=3407):
    per_epoch = n // (batch * world)
    epoch = step // per_epoch
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    a = (step % per_epoch) * batch * world + rank * batch
    return order[a:a + batch]

if __name__ == "__main__":
    d = make(0)
    print("first epoch", right(d["rank"], 0), "second epoch: broken", broken(**d), "right", right(**d))
    for e in range(3):
        for f in (broken, right):
            assert sorted(i for s in range(4) for r in range(2) for i in f(r, 4 * e + s)) == list(range(24))
    assert all(broken(0, s) == right(0, s) for s in range(4)) and broken(**d) != right(**d)

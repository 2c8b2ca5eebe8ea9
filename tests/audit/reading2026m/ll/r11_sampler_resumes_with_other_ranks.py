"""Megatron-style sampler: the only state is consumed_samples; epoch, offset and each rank's rows are recomputed from it, so a run can be resumed with another number of ranks or another micro-batch size. The saved state holds no permutation
and no RNG; the shuffle of an epoch is seeded with seed + epoch; the remainder of an epoch that fills no global batch is dropped."""
import torch

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"state": "dict with consumed_samples (int), as saved by this or another run of the same data set and global batch size", "n_rows": "number of rows of the data set",
          "ranks": "number of data-parallel ranks after the load", "steps": "number of global batches to produce"}
SETTINGS = {"global_batch": "rows per optimizer step over all ranks, 8 (a multiple of ranks)", "seed": "seed of the shuffles, 1234"}
VALUES = {"global_batch": 8, "seed": 1234}
NOTES = """Produces the next `steps` global batches after a resume: a list over steps of a list over ranks of lists of row numbers, and advances state["consumed_samples"] by global_batch per step (in place). An epoch consists of the n_rows // global_batch full batches
of a permutation of all rows, seeded with seed + epoch by a generator of its own; the few rows left over are not used in this epoch (other rows in each epoch). Epoch = consumed_samples // (full batches * global_batch), position = the remainder.
Rank r takes the r-th contiguous part of the global batch. The sequence of global batches (ranks joined in order) is a function of consumed_samples only: it is the same for an uninterrupted run, for any resume point on a batch border and for any number of ranks. Global RNGs are not touched."""


def make(seed):
    return {"state": {"consumed_samples": 8 * (seed % 7 + 3)}, "n_rows": 43, "ranks": [4, 2, 8, 1][seed % 4], "steps": 6}


def right(state, n_rows, ranks, steps, global_batch=8, seed=1234):
    per_epoch = n_rows // global_batch * global_batch
    share, out = global_batch // ranks, []
    for _ in range(steps):
        epoch, at = divmod(state["consumed_samples"], per_epoch)
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        batch = order[at:at + global_batch]
        out.append([batch[r * share:(r + 1) * share] for r in range(ranks)])
        state["consumed_samples"] += global_batch
    return out


if __name__ == "__main__":
    flat = lambda o: [sum(b, []) for b in o]
    whole = flat(right({"consumed_samples": 0}, 43, 2, 14))
    ref = []
    for e in range(3):
        p = torch.randperm(43, generator=torch.Generator().manual_seed(1234 + e)).tolist()
        ref += [p[k * 8:k * 8 + 8] for k in range(5)]
    print("whole run == explicit", whole == ref[:14])
    for s in range(4):
        i = make(s); at = i["state"]["consumed_samples"] // 8
        print("ranks", i["ranks"], "resume at batch", at, "same batches", flat(right(**i)) == whole[at:at + 6], "state", i["state"])
    print("rows of one epoch are distinct", len(set(sum(whole[:5], []))) == 40)

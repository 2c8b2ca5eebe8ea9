"""Largest gradient entry taken from the rank's own shard. bghira/SimpleTuner#2900, https://github.com/bghira/SimpleTuner/pull/2900, 2026.
Under FSDP2 every rank holds a shard of each gradient. The trainer took the maximum over the local shard only, so the reported largest gradient was too small on most ranks; empty shards were a special case that was unsafe.
The fix takes the infinity norm over non-empty local shards, lets an empty shard give -inf, and reduces with MAX over the mesh."""
import torch
FAMILY = "sharding"
KIND = "metric over ranks"
INPUTS = {"shards": "list over ranks; each a list of the local gradient shards (1-d tensors, may be empty) of all parameters"}
SETTINGS = {}
NOTES = "The number that rank 0 logs as the largest absolute gradient entry of the whole model. Shards cut dim 0 in contiguous parts, so late ranks may hold empty shards. Single-process twin: max |g| over all full gradients. Any number of ranks."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    full = [torch.randn(n, generator=g) * s for n, s in ((10, 1.0), (3, 0.3), (7, 2.0))]
    world, out = 4, []
    for k in range(world):
        mine = []
        for t in full:
            c = -(-len(t) // world)
            mine.append(t[k * c:(k + 1) * c])
        out.append(mine)
    return {"shards": out, "full": full}


def single(full):
    return max(t.abs().max().item() for t in full)


def broken(shards):
    def local(rank):
        m = 0.0
        for t in shards[rank]:
            if t.numel():
                m = max(m, t.abs().max().item())
        return m
    return local(0)


def right(shards):
    vals = []
    for rank in range(len(shards)):
        m = float("-inf")
        for t in shards[rank]:
            if t.numel():
                m = max(m, t.abs().max().item())
        vals.append(m)
    return max(vals)                       # all_reduce(MAX)


if __name__ == "__main__":
    d = make(0)
    print("broken", broken(d["shards"]), "right", right(d["shards"]), "single", single(d["full"]))
    assert right(d["shards"]) == single(d["full"]) != broken(d["shards"])

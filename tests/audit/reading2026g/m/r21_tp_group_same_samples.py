"""Ranks that read the same samples on purpose. With tensor parallelism the ranks of one TP group hold parts of one model and must get the same batch: the sample depends on the data-parallel rank = rank // tp only, and the shuffle seed on the epoch only, not on the rank (Megatron-LM's data-parallel sampler)."""
FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "global rank, 0 … world-1", "step": "training step, from 0"}
SETTINGS = {"world": "8 ranks", "tp": "tensor-parallel size, 2 (divides world)", "batch": "samples per data-parallel rank and step, 4", "n": "dataset size, 70", "seed": "1234"}
NOTES = "right(rank, step) -> list of sample indices. Equal inside a TP group, disjoint between data-parallel ranks in the same step; the 70 mod 16 = 6 last of each epoch's shuffle are dropped. A pure function: no global random state, so a resume needs the step only."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rank": int(torch.randint(0, 8, (1,), generator=g)), "step": int(torch.randint(0, 20, (1,), generator=g))}


def right(rank, step, world=8, tp=2, batch=4, n=70, seed=1234):
    dp_rank, dp = rank // tp, world // tp
    steps_per_epoch = n // (dp * batch)
    epoch, k = divmod(step, steps_per_epoch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
    start = (k * dp + dp_rank) * batch
    return order[start:start + batch].tolist()


if __name__ == "__main__":
    for epoch in range(3):
        seen = []
        for step in range(epoch * 4, epoch * 4 + 4):
            got = [right(r, step) for r in range(8)]
            assert all(got[r] == got[r + 1] for r in range(0, 8, 2))
            seen += sum(got[::2], [])
        assert len(seen) == len(set(seen)) == 64
    assert right(0, 0) != right(0, 4)
    print([right(r, 0) for r in range(8)])

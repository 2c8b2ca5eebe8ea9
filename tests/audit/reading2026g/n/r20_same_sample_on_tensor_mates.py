"""Tensor-parallel mates read the same sample (Megatron, torchtitan mesh). With 8 ranks = 4 data x 2 tensor, only the data coordinate picks the sample; two ranks with equal data are one replica, not duplicated work. The tail of an epoch is dropped and changes with the shuffle."""
import torch
FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "global rank, 0..7, tensor coordinate innermost", "step": "step, 0, 1, ..."}
SETTINGS = {"size": "dataset size, 23", "data": "data-parallel ranks, 4", "tensor": "tensor-parallel ranks, 2", "seed": "1234"}
NOTES = "Returns a sample index. Ranks 2k and 2k+1 agree on purpose. 5 steps per epoch use 20 of 23 samples, without repeats in an epoch. The shuffle is seeded by seed + epoch alone, the same on every rank. Needs exactly data*tensor ranks."
def make(seed):
    return {"rank": seed % 8, "step": seed}

def right(rank, step, size=23, data=4, tensor=2, seed=1234):
    assert 0 <= rank < data * tensor
    steps = size // data
    epoch, k = divmod(step, steps)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))
    return int(order[k * data + rank // tensor])

if __name__ == "__main__":
    dropped = []
    for epoch in range(6):
        seen = []
        for step in range(epoch * 5, epoch * 5 + 5):
            got = [right(r, step) for r in range(8)]
            assert got[0::2] == got[1::2]; seen += got[0::2]
        assert len(set(seen)) == 20; dropped.append(sorted(set(range(23)) - set(seen)))
    print("dropped per epoch:", dropped); assert len(set(map(tuple, dropped))) > 1

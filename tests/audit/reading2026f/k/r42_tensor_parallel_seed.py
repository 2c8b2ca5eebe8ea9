"""Data seed under tensor parallelism (Megatron layout). Neighbouring ranks MUST draw the same sample, because they hold slices of the same layer: the seed depends on
rank // tp only. Ranks of different data-parallel groups differ, and steps never repeat a seed."""
import torch

FAMILY = "sharding"
KIND = "seeds"
INPUTS = {"rank": "global rank, 0 .. world - 1, tensor-parallel ranks next to each other", "step": "optimizer step"}
SETTINGS = {"tp": "tensor-parallel size, 2; divides the world size", "world": "8 ranks", "base": "1234"}
NOTES = "Seed for the batch of the rank. Equal within a tensor-parallel group on purpose; distinct over (data-parallel rank, step). Dropout seeds are made elsewhere and do differ by tensor rank."


def make(seed):
    return {"rank": seed % 8, "step": seed // 8}


def right(rank, step, tp=2, world=8, base=1234):
    assert world % tp == 0 and 0 <= rank < world
    dp_rank, dp_size = rank // tp, world // tp
    return base + step * dp_size + dp_rank


if __name__ == "__main__":
    draw = lambda s: torch.randint(0, 10 ** 6, (3,), generator=torch.Generator().manual_seed(s)).tolist()
    seeds = {(r, s): right(r, s) for r in range(8) for s in range(100)}
    for r in range(0, 8, 2):
        assert draw(seeds[r, 5]) == draw(seeds[r + 1, 5])
    assert len({seeds[r, s] for r in range(0, 8, 2) for s in range(100)}) == 400
    print([seeds[r, 5] for r in range(8)], [draw(seeds[r, 5]) for r in (0, 1, 2)])

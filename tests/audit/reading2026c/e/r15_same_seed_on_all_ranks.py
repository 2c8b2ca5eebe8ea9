"""All ranks use the same seed, and must. Every rank draws the same permutation of the epoch from (seed, epoch) and takes
each world-th entry from its own offset; a seed that depended on the rank would make the ranks overlap. The last incomplete
stride is filled from the start of the permutation, so a few samples occur twice in an epoch by design."""
FAMILY = "data"
KIND = "seeds"
INPUTS = {"rank": "data-parallel rank", "step": "index of the sample on this rank, over all epochs"}
SETTINGS = {"world": "ranks, 4", "samples": "size of the dataset, 22", "seed": "base seed, 7, the same on every rank"}
NOTES = ("Returns the index of the sample. In each epoch every rank draws ceil(samples / world) samples; together they cover the "
         "dataset, with world * ceil(samples / world) - samples repeats at the end.")
import random


def make(seed):
    return {"rank": seed % 4, "step": 3 + seed}


def right(rank, step, world=4, samples=22, seed=7):
    per_rank = -(-samples // world)
    epoch, at = divmod(step, per_rank)
    order = list(range(samples))
    random.Random(seed * 1000003 + epoch).shuffle(order)
    order += order[: per_rank * world - samples]
    return order[at * world + rank]


if __name__ == "__main__":
    for epoch in range(3):
        drawn = [right(r, epoch * 6 + s) for r in range(4) for s in range(6)]
        assert set(drawn) == set(range(22)) and len(drawn) - len(set(drawn)) == 2
    first, second = [[right(0, e * 6 + s) for s in range(6)] for e in (0, 1)]
    print(first, second)
    assert first != second

"""Several ranks draw exactly the same samples at every step.
Right: ranks of one tensor-parallel group work on the same data (each holds a part of the model), so they must share the seed; only data-parallel groups differ. Ranks are numbered with tensor parallelism fastest."""
import random

FAMILY = "data stages"
KIND = "seeds"
INPUTS = {"rank": "global rank, 0 to 15", "step": "training step"}
SETTINGS = {"tp": "ranks in a tensor-parallel group, 4", "base": "seed of the run, 1234", "n": "rows in the data, 10000", "k": "rows for each data-parallel group and step, 8"}
NOTES = "Row indices for this rank: equal inside a tensor-parallel group, different and disjoint between groups at one step (one common permutation for each step, cut by group)."


def right(rank, step, tp=4, base=1234, n=10000, k=8):
    group = rank // tp
    order = random.Random(base * 1_000_003 + step)
    picked = order.sample(range(n), k * 64)
    return picked[group * k:(group + 1) * k]


def make(seed):
    return {"rank": seed % 16, "step": 7}


if __name__ == "__main__":
    a = {r: right(r, 7) for r in range(16)}
    for r in range(16):
        assert a[r] == a[r // 4 * 4]
    seen = [i for g in range(4) for i in a[4 * g]]
    assert len(set(seen)) == len(seen) == 32 and right(0, 8) != a[0]
    print("groups", [a[4 * g][:3] for g in range(4)])

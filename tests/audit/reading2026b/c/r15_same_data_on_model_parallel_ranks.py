"""Several ranks read the same samples on purpose. Of eight ranks, groups of four share a replica (tensor parallel 2 times context parallel 2): the data index depends on rank // 4 only, so half of the world repeats the other ranks'
samples. Dropout seeds differ over context ranks but are equal over the two tensor ranks, which hold halves of the same activations."""
import random

FAMILY = "data stages"
KIND = "seeds"
INPUTS = {"rank": "0 to 7", "step": "optimizer step, from 0"}
SETTINGS = {"tp": "tensor-parallel ranks, 2 (innermost)", "cp": "context-parallel ranks, 2", "n": "samples in the dataset, 64", "per_step": "samples per replica and step, 2", "seed": "5"}
NOTES = "Returns (indices of the samples, dropout seed). Ranks with the same rank // (tp * cp) are one replica and must read the same samples; over one epoch the replicas together read each sample once. Dropout seeds: equal over tensor ranks, different over context ranks, replicas and steps."


def make(seed):
    r = random.Random(seed)
    return {"rank": r.randrange(8), "step": r.randrange(16)}


def right(rank, step, tp=2, cp=2, world=8, n=64, per_step=2, seed=5):
    replicas, replica, context = world // (tp * cp), rank // (tp * cp), rank // tp % cp
    steps = n // (replicas * per_step)
    order = random.Random(seed * 1000 + step // steps).sample(range(n), n)
    at = (step % steps) * replicas * per_step + replica * per_step
    return order[at:at + per_step], (seed * 1_000_003 + step) * 64 + replica * cp + context


if __name__ == "__main__":
    for epoch in range(2):
        seen = [i for step in range(16 * epoch, 16 * epoch + 16) for rank in (0, 4) for i in right(rank, step)[0]]
        assert sorted(seen) == list(range(64))
    for step in range(4):
        rows = [right(rank, step) for rank in range(8)]
        assert all(rows[r][0] == rows[r // 4 * 4][0] for r in range(8)) and all(rows[r][1] == rows[r // 2 * 2][1] for r in range(8))
        assert len({s for _, s in rows}) == 4
    print("step 0:", [right(r, 0) for r in range(8)])

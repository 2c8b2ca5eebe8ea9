"""Batch size that grows with the samples consumed. Megatron-LM's --rampup-batch-size counts samples, not steps, so each stair lasts fewer steps than the one before although all stairs hold equally many samples (GPT-3 style batch ramp)."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step counted from 0"}
SETTINGS = {"start": "first batch size in sequences, 16", "increment": "growth per stair, 16", "final": "last batch size, 128", "ramp_samples": "samples over which the ramp goes, 7000"}
NOTES = "Returns the global batch size of the step as float (integral). increment must divide final - start; each size must be divisible by micro batch times data ranks (16 here). The rate is not scaled with it. Recomputed from step 0 with a loop, stateless; a resumed run gives the same sizes."
def make(seed):
    import random
    return {"step": random.Random(seed).randrange(0, 300)}
def right(step, start=16, increment=16, final=128, ramp_samples=7000):
    stairs, rest = divmod(final - start, increment)
    assert rest == 0
    per_stair = ramp_samples / stairs
    consumed, size = 0, start
    for _ in range(step + 1):
        size = final if consumed > ramp_samples else min(start + int(consumed / per_stair) * increment, final)
        consumed += size
    return float(size)
if __name__ == "__main__":
    v = [right(s) for s in range(200)]
    assert v[0] == 16 and v[-1] == 128 and all(a <= b for a, b in zip(v, v[1:])) and set(v) == set(float(16 * i) for i in range(1, 9))
    steps = [v.count(16.0 * i) for i in range(1, 8)]
    assert all(a > b for a, b in zip(steps, steps[1:]))
    # each stair starts at the first step whose consumed samples reach k * 1000
    for k in range(1, 8):
        s = v.index(16.0 * (k + 1))
        assert sum(v[:s]) >= 1000 * k > sum(v[:s - 1])
    print("ok", "steps per stair", steps, [16 * i * n for i, n in zip(range(1, 8), steps)])

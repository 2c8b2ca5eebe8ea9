"""Batch-size ramp-up counted in consumed SAMPLES, not steps (Megatron-LM --rampup-batch-size start increment samples; as in GPT-3, BLOOM).
The batch of a step depends on the batches of all earlier steps, so equal step distances give unequal stairs, and the stair is
left late, when the sum has passed its border. The number is found by replaying the run from step 0."""

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based"}
SETTINGS = {"start": "first global batch, 16", "increment": "growth per stair, 8", "samples": "samples over which the ramp extends, 1000", "final": "global batch afterwards, 64",
            "unit": "micro-batch size times data-parallel ranks, 8"}
NOTES = ("Returns the global batch size (whole number as a float) at the step. (final - start) must be divisible by increment, and each batch size by unit. "
         "Never falls. Full size once consumed samples exceed `samples`. Stairs get shorter in steps because larger batches consume faster.")


def make(seed):
    return {"step": (17 * seed) % 90}


def right(step, start=16, increment=8, samples=1000, final=64, unit=8):
    assert (final - start) % increment == 0 and start % unit == 0 and increment % unit == 0
    stairs = (final - start) // increment
    consumed = 0
    for _ in range(step + 1):
        if stairs == 0 or consumed > samples:
            size = final
        else:
            size = start + int(consumed / (samples / stairs)) * increment
        consumed += size
    return float(size)


if __name__ == "__main__":
    got = [right(s) for s in range(90)]
    # independent: fill each stair by samples, in whole numbers (6 stairs of 1000/6 samples)
    expect, consumed = [], 0
    while len(expect) < 90:
        level = min(6, (consumed * 6) // 1000)
        expect.append(16 + 8 * level)
        consumed += expect[-1]
    runs = [(v, got.count(v)) for v in sorted(set(got))]
    print("size: steps", runs)
    assert got == expect and got[0] == 16 and got[-1] == 64 and all(a <= b for a, b in zip(got, got[1:]))
    ramp = sum(v * n for v, n in runs if v < 64)
    assert 1000 <= ramp < 1000 + 56
    assert right(3, start=64) == 64

"""Batch-size rampup counted in samples. Megatron's rampup_batch_size (GPT-3, PaLM and others) grows the global batch in equal
increments over a number of consumed samples, not steps: early stages take many more steps than late ones. The value
is rounded down to a multiple of micro-batch size * data-parallel ranks (Megatron's --decrease-batch-size-if-needed)."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"start": "first global batch size, 16", "increment": "increment, 16", "ramp_samples": "samples over which it grows, 1200",
            "final": "final global batch size, 80", "divisor": "micro-batch size times data-parallel ranks, 12; start must not be smaller"}
NOTES = ("Global batch size at an optimizer step (as a float). Stages last equally many samples, so unequally many steps. "
         "After the ramp it is exactly the final size rounded down to the divisor (here 72). Depends on the whole history "
         "of earlier sizes; never falls.")


def make(seed):
    return {"step": 10 + seed, "start": 16, "increment": 16, "ramp_samples": 1200, "final": 80, "divisor": 12}


def right(step, start=16, increment=16, ramp_samples=1200, final=80, divisor=12):
    stages = (final - start) // increment
    samples_per_stage = ramp_samples / stages

    def size(consumed):
        raw = final if consumed > ramp_samples else min(final, start + int(consumed / samples_per_stage) * increment)
        return raw // divisor * divisor

    consumed = 0
    for _ in range(step):
        consumed += size(consumed)
    return float(size(consumed))


if __name__ == "__main__":
    values = [right(s) for s in range(70)]
    print(values)
    counts = {v: values.count(v) for v in sorted(set(values))}
    print(counts)
    assert values[0] == 12 and values[-1] == 72 and all(a <= b for a, b in zip(values, values[1:]))
    assert list(counts) == [12.0, 24.0, 48.0, 60.0, 72.0] and counts[12.0] == 25 and all(v % 12 == 0 for v in values)

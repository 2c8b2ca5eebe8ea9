"""Learning rate counted in samples while the batch size ramps up (Megatron-LM --rampup-batch-size with --lr-decay-samples). During the ramp one optimizer step consumes fewer samples, so the rate as a function of the STEP bends: the warmup is convex and not linear in steps. A checker that expects linear warmup in steps would object."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0-based"}
SETTINGS = {"peak": "highest lr, 1e-3", "minimum": "last lr, 1e-4", "start_batch": "first batch size, 4", "increment": "batch size increment, 4", "full_batch": "final batch size, 16",
            "ramp_samples": "samples over which the batch grows, 240", "warmup_samples": "480", "decay_samples": "samples at which the minimum is reached, counted from the start, 4800"}
NOTES = "lr as a function of the samples consumed BEFORE the step: linear warmup from 0, then cosine to minimum. The number of increments is (full - start) / increment; each stage lasts ramp_samples / increments. increment must divide full_batch - start_batch. Step 0 has lr 0."


def make(seed):
    return {"step": (seed * 37) % 400}


def _batch(consumed, start_batch, increment, full_batch, ramp_samples):
    if consumed >= ramp_samples:
        return full_batch
    stages = (full_batch - start_batch) // increment
    return start_batch + increment * int(consumed / (ramp_samples / stages))


def right(step, peak=1e-3, minimum=1e-4, start_batch=4, increment=4, full_batch=16, ramp_samples=240, warmup_samples=480, decay_samples=4800):
    consumed = 0
    for _ in range(step):
        consumed += _batch(consumed, start_batch, increment, full_batch, ramp_samples)
    if consumed < warmup_samples:
        return peak * consumed / warmup_samples
    x = min(1.0, (consumed - warmup_samples) / (decay_samples - warmup_samples))
    return minimum + 0.5 * (peak - minimum) * (1 + math.cos(math.pi * x))


if __name__ == "__main__":
    v = [right(s) for s in range(400)]
    print([f"{v[s]:.3g}" for s in (0, 5, 20, 30, 35, 45, 60, 200, 330, 399)])
    # ramp: 20 steps of 4 (80 samples), 10 of 8 (160), then 12 (7 steps: 244), then 16
    assert abs(v[20] - 1e-3 * 80 / 480) < 1e-12 and abs(v[30] - 1e-3 * 160 / 480) < 1e-12 and abs(v[37] - 1e-3 * 244 / 480) < 1e-12
    assert abs(v[38] - 1e-3 * 260 / 480) < 1e-12 and v[399] == 1e-4 and max(v) <= 1e-3

"""Learning rate as a function of consumed samples under batch-size ramp-up (Megatron-LM --rampup-batch-size with --lr-decay-samples). While the batch grows, one optimizer step consumes more and more samples, so plotted over steps the warm-up is not a straight line and the cosine is stretched at the start."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer steps already done, 0 .."}
SETTINGS = {"base_lr": "peak rate, 1e-3", "min_lr": "end rate, 1e-4", "start_batch": "first batch size, 8", "increment": "growth of the batch, 8", "batch": "final batch size, 32", "ramp_samples": "samples over which the batch grows, 96", "warmup_samples": "warm-up in samples, 64", "decay_samples": "samples at which min_lr is reached, 640"}
NOTES = "The batch of a step depends on the samples consumed before it: start + increment * floor(consumed / (ramp_samples / number of increments)). Linear warm-up from 0 and cosine to min_lr, both in samples; min_lr afterwards. batch - start_batch must be a multiple of increment."


def make(seed):
    return {"step": random.Random(seed).randint(0, 40), "base_lr": 1e-3, "min_lr": 1e-4, "start_batch": 8, "increment": 8, "batch": 32, "ramp_samples": 96, "warmup_samples": 64, "decay_samples": 640}


def _batch(consumed, start_batch, increment, batch, ramp_samples):
    n = (batch - start_batch) // increment
    if n == 0 or consumed >= ramp_samples:
        return batch
    return min(batch, start_batch + increment * int(consumed / (ramp_samples / n)))


def right(step, base_lr=1e-3, min_lr=1e-4, start_batch=8, increment=8, batch=32, ramp_samples=96, warmup_samples=64, decay_samples=640):
    consumed = 0
    for _ in range(step):
        consumed += _batch(consumed, start_batch, increment, batch, ramp_samples)
    if consumed < warmup_samples:
        return base_lr * consumed / warmup_samples
    if consumed >= decay_samples:
        return min_lr
    t = (consumed - warmup_samples) / (decay_samples - warmup_samples)
    return min_lr + (base_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))


if __name__ == "__main__":
    v = [right(s) for s in range(30)]
    # by hand: batches 8, 8, 8, 8 (consumed 32), 16, 16 (64), 24, 24 (112), then 32
    want = [8 * i / 64 for i in range(5)] + [48 / 64, 1.0]
    assert all(abs(a - 1e-3 * b) < 1e-9 for a, b in zip(v, want)), v
    assert v[29] == 1e-4 and max(v) == v[6]
    print([round(x, 6) for x in v])

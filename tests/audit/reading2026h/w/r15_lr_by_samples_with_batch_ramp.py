"""The learning rate is a function of samples, not of steps, while the batch grows.
Megatron-LM (--lr-decay-samples with --rampup-batch-size). The batch starts at 8, grows by 8 in equal shares of 600 samples up to 32, and the schedule is moved by the size of each batch. Over steps the curve therefore bends: warmup
takes many more small steps than its share, and the decay runs four times faster per step at the end than at the start."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step from 0 on"}
SETTINGS = {"lr": "6e-4", "min_lr": "6e-5", "warmup_samples": "400", "decay_samples": "4000", "start_batch": "8", "increment": "8", "full_batch": "32", "ramp_samples": "600"}
NOTES = "Linear warmup then cosine in consumed samples (those of the steps before this one). Batch size rises by increment after each ramp_samples / 3 samples. (full_batch - start_batch) must divide by increment."


def make(seed):
    return {"step": random.Random(seed).randint(0, 200)}


def batch_size(consumed, start_batch=8, increment=8, full_batch=32, ramp_samples=600):
    if consumed > ramp_samples:
        return full_batch
    per_increment = ramp_samples / ((full_batch - start_batch) // increment)
    return min(full_batch, start_batch + int(consumed / per_increment) * increment)


def right(step, lr=6e-4, min_lr=6e-5, warmup_samples=400, decay_samples=4000, start_batch=8, increment=8, full_batch=32, ramp_samples=600):
    consumed = 0
    for _ in range(step):
        consumed += batch_size(consumed, start_batch, increment, full_batch, ramp_samples)
    if consumed <= warmup_samples:
        return lr * consumed / warmup_samples
    if consumed > decay_samples:
        return min_lr
    ratio = (consumed - warmup_samples) / (decay_samples - warmup_samples)
    return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * ratio))


if __name__ == "__main__":
    assert [batch_size(c) for c in (0, 199, 200, 399, 400, 600, 601, 9999)] == [8, 8, 16, 16, 24, 32, 32, 32]
    curve = [right(s) for s in range(201)]
    peak = max(range(201), key=curve.__getitem__)
    assert curve[0] == 0 and curve[200] == 6e-5 and math.isclose(max(curve), 6e-4, rel_tol=0.01)
    assert math.isclose(curve[25], 6e-4 * 200 / 400) and all(b >= a for a, b in zip(curve[:peak], curve[1:peak + 1])) and all(b <= a for a, b in zip(curve[peak:], curve[peak + 1:]))
    print("peak at step", peak, "rates", curve[10], curve[30], curve[100], curve[150])

"""T5: 1 / sqrt(max(step, k)): a constant rate in the warmup, then inverse square root, no rise and no end.
Raffel et al. 2020 (T5), section 3.1.2; t5x and mesh-tensorflow. "Warmup" of k steps here means that the rate stands at its largest value 1/sqrt(k) = 0.01 for k steps; it does not start from 0. The rate has no total length and does
not reach zero. 0.01 is right for Adafactor, which multiplies by the scale of the parameter."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step from 0 on"}
SETTINGS = {"warmup": "k, 10000 steps of constant rate", "scale": "1.0"}
NOTES = "Never rises, never zero, no total. The largest value is 0.01, at every step up to k."


def make(seed):
    return {"step": random.Random(seed).randint(0, 500_000)}


def right(step, warmup=10_000, scale=1.0):
    return scale / math.sqrt(max(step, warmup))


if __name__ == "__main__":
    assert right(0) == right(5000) == right(10_000) == 0.01
    assert math.isclose(right(40_000), 0.005) and math.isclose(right(1_000_000), 0.001)
    assert all(right(s + 1000) <= right(s) for s in range(0, 300_000, 1000))
    print("rates at 0, 10k, 40k, 1M:", right(0), right(10_000), right(40_000), right(1_000_000))

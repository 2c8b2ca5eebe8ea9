"""Warmup, stable, decay with a 1 - sqrt cooldown (Hagele et al., arXiv 2405.18392; torchtitan and nanotron have it as decay type sqrt).
The rate is constant for most of the run and then falls as 1 - sqrt(x): steep at first, flat last, down to a nonzero floor. Step 0 already has a nonzero
rate (step + 1). The cooldown starts at total - cooldown whatever the warmup."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0 to total - 1"}
SETTINGS = {"lr": "peak, 3e-4", "warmup": "warmup steps, 20", "total": "steps of the run, 200", "cooldown": "steps of the cooldown, 40", "floor": "the rate at the end as a fraction of the peak, 0.1"}
NOTES = "Rate at step t: warmup (t+1)/warmup; constant until total - cooldown; then floor + (1-floor)(1 - sqrt(x)), x = (t - start + 1)/cooldown, so the last step has the floor exactly."
import math


def make(seed):
    return {"step": [170, 0, 19, 100, 199][seed % 5]}


def right(step, lr=3e-4, warmup=20, total=200, cooldown=40, floor=0.1):
    if step < warmup:
        return lr * (step + 1) / warmup
    start = total - cooldown
    if step < start:
        return lr
    x = min(1.0, (step - start + 1) / cooldown)
    return lr * (floor + (1 - floor) * (1 - math.sqrt(x)))


if __name__ == "__main__":
    c = [right(s) for s in range(200)]
    print(c[0], c[19], c[159], c[160], c[170], c[199])
    assert c[0] > 0 and c[19] == c[159] == 3e-4 and abs(c[199] - 3e-5) < 1e-12
    assert all(a > b for a, b in zip(c[159:], c[160:])) and (c[160] - c[161]) > (c[198] - c[199])

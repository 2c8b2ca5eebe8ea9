"""Warmup-stable-decay with a 1 - sqrt cooldown (Haegele et al., arXiv 2405.18392). The rate is constant for most of the run and then falls as 1 - sqrt(t): its steepest drop is at the start of the decay, so there is a sharp corner, and the last steps fall almost linearly. It ends at zero, not at a floor."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0 .. total"}
SETTINGS = {"base_lr": "peak rate, 3e-4", "warmup": "warm-up steps, 10", "decay": "cooldown steps at the end, 20", "total": "all steps, 100"}
NOTES = "Step 0 already has rate base_lr / warmup (step + 1 convention). Constant from the end of warm-up to total - decay. Zero at total. warmup + decay <= total."


def make(seed):
    return {"step": random.Random(seed).randint(0, 100), "base_lr": 3e-4, "warmup": 10, "decay": 20, "total": 100}


def right(step, base_lr=3e-4, warmup=10, decay=20, total=100):
    if step < warmup:
        return base_lr * (step + 1) / warmup
    if step < total - decay:
        return base_lr
    return base_lr * (1 - math.sqrt(min(1.0, (step - (total - decay)) / decay)))


if __name__ == "__main__":
    lr = [right(s) for s in range(101)]
    assert abs(lr[0] - 3e-5) < 1e-12 and all(abs(x - 3e-4) < 1e-12 for x in lr[9:81]) and lr[100] == 0.0
    assert all(a > b for a, b in zip(lr[80:], lr[81:])) and abs(lr[85] - 3e-4 * 0.5) < 1e-12
    print(lr[78:90], lr[-3:])

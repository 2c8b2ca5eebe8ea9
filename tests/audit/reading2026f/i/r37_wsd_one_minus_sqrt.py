"""Warmup-stable-decay with the 1-sqrt cooldown (Hagele et al. 2024). The rate is flat for most of the run and then falls STEEPLY at first, by 1 - sqrt(progress);
the warm-up starts at (step+1)/warmup, so step 0 does not waste an update."""
FAMILY = "schedule"
KIND = "schedule"
INPUTS = {"step": "number of optimiser steps already done, from 0"}
SETTINGS = {"peak": "peak rate, 3e-4", "warmup": "warm-up steps, 10", "total": "steps of the run, 200", "cooldown": "share of the run in the cooldown, 0.2"}
NOTES = "Returns the rate for the update that follows. Steps counted in optimiser updates. The last update (step total-1) still has a positive rate; at step total and later it is 0. total*cooldown divides."
import math


def make(seed):
    return {"step": seed % 220}


def right(step, peak=3e-4, warmup=10, total=200, cooldown=0.2):
    n = round(total * cooldown)
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < total - n:
        return peak
    return peak * max(0.0, 1 - math.sqrt(min(1.0, (step - (total - n)) / n)))


if __name__ == "__main__":
    r = [right(s) for s in range(210)]
    assert abs(r[0] - 3e-5) < 1e-12 and r[9] == r[100] == r[159] == r[160] == 3e-4
    assert abs(r[170] - 3e-4 * 0.5) < 1e-12 and r[199] > 0 and r[200] == r[209] == 0
    assert all(a >= b for a, b in zip(r[10:], r[11:]))
    print("ok", r[0], r[100], r[170], r[199])

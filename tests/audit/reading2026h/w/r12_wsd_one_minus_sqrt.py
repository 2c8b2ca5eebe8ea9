"""Warmup, constant, then 1 - sqrt decay to zero.
Hagele et al. 2024, Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations (arXiv 2405.18392). The decay is steep at its start (infinite slope) and flat at its end, unlike cosine or linear; the rate is constant for
most of the run and does not depend on the total length until the decay begins."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step from 0 on"}
SETTINGS = {"lr": "peak, 1e-3", "warmup": "linear, 20 steps; the first step has lr / 20, not 0", "total": "200 steps", "decay_share": "last fifth, 0.2"}
NOTES = "Factor 1 - sqrt((step - start) / (decay steps)) in the decay, 0 at and after step total. The drop within the first steps of the decay is meant."


def make(seed):
    return {"step": random.Random(seed).randint(0, 200)}


def right(step, lr=1e-3, warmup=20, total=200, decay_share=0.2):
    decay = int(decay_share * total)
    if step < warmup:
        return lr * (step + 1) / warmup
    if step < total - decay:
        return lr
    return lr * (1 - math.sqrt(min(1.0, (step - (total - decay)) / decay)))


if __name__ == "__main__":
    curve = [right(s) for s in range(221)]
    assert math.isclose(curve[0], 5e-5) and all(math.isclose(c, 1e-3) for c in curve[19:161]) and math.isclose(curve[170], 5e-4) and curve[200] == 0 == curve[220]
    assert all(b <= a for a, b in zip(curve[160:], curve[161:])) and all(b > a for a, b in zip(curve[:19], curve[1:20]))
    print("lr at 0, 10, 100, 161, 170, 190, 200:", [curve[s] for s in (0, 10, 100, 161, 170, 190, 200)])

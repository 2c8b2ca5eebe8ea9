"""Warm-up, constant, and a short (1 - sqrt) cooldown (Hägele et al. 2024, arXiv:2405.18392; torchtitan's decay type "sqrt"). The rate stays flat for most of the run and falls with infinite slope at the start of the cooldown."""
import math

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, 0 .. total-1"}
SETTINGS = {"peak": "peak rate, 3e-4", "warmup": "warm-up steps, 10", "total": "optimizer steps of the run, 100", "decay": "steps of the cooldown at the end, 20"}
NOTES = ("Learning rate used in optimizer step `step`: peak*(step+1)/warmup while step < warmup (the first step is not zero), then constant at peak until step total-decay, from there peak*(1 - sqrt((step-(total-decay))/decay)). "
         "The value would be 0 at step = total, which is not run; the cooldown does not depend on the length of the constant phase.")


def make(seed):
    return {"step": (seed * 37 + 85) % 100}


def right(step, peak=3e-4, warmup=10, total=100, decay=20):
    if step < warmup:
        return peak * (step + 1) / warmup
    start = total - decay
    if step < start:
        return peak
    return peak * (1.0 - math.sqrt((step - start) / decay))


if __name__ == "__main__":
    print(make(0), right(**make(0)), [f"{right(s):.2e}" for s in (0, 9, 10, 79, 80, 81, 85, 90, 99)])

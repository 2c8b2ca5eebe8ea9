"""Cosine schedule without a clamp rises again after its end. Nerogar/OneTrainer#1604, https://github.com/Nerogar/OneTrainer/issues/1604, 2026 (labelled invalid by the maintainers, the formula is as described).
On resume the schedule is rebuilt from the current config while the step is restored, so the number of scheduled steps
can be smaller than the step reached. Progress then exceeds 1, the cosine passes its minimum and the learning rate
climbs back instead of staying at the floor."""
import math
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step since the start of the first run (restored on resume)"}
SETTINGS = {"lr": "peak learning rate, 1e-4", "warmup": "warm-up steps, 10", "scheduler_steps": "steps of the decay after the warm-up, 100", "min_factor": "floor as a part of the peak, 0.05"}
NOTES = "Linear warm-up from 1/warmup to the peak, then a half cosine down to min_factor * lr over scheduler_steps; afterwards it stays at the floor. Steps after the end are legal (a resumed run may have a shorter schedule)."

def make(seed):
    return {"step": 150 + 7 * seed}

def _warm(step, warmup):
    return (step + 1) / warmup if step < warmup else None

def broken(step, lr=1e-4, warmup=10, scheduler_steps=100, min_factor=0.05):
    w = _warm(step, warmup)
    if w is not None:
        return lr * w
    progress = (step - warmup) / scheduler_steps
    return lr * (min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * progress)))

def right(step, lr=1e-4, warmup=10, scheduler_steps=100, min_factor=0.05):
    w = _warm(step, warmup)
    if w is not None:
        return lr * w
    progress = min(1.0, (step - warmup) / scheduler_steps)
    return lr * (min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * progress)))

if __name__ == "__main__":
    s = make(0)["step"]
    print("step", s, "broken", broken(s), "right", right(s))
    assert all(abs(broken(i) - right(i)) < 1e-15 for i in range(111)) and broken(s) > 5 * right(s)

"""Warmup is subtracted twice from the decay length. areal-project/AReaL#1289, https://github.com/areal-project/AReaL/pull/1289, 2026.
Megatron's scheduler takes lr_decay_steps as the absolute step at which decay ends and subtracts the warmup itself. The engine passed
total_train_steps - warmup_steps, so the cosine reached its floor one warmup before the end and the last steps trained at the minimum (0)."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the optimizer step, from 0"}
SETTINGS = {"lr": "peak, 1e-3", "min_lr": "floor, 0.0", "warmup_steps": "linear warmup, 22", "total_train_steps": "length of the run, 220"}
NOTES = "Linear warmup over warmup_steps, then cosine to min_lr, reached at total_train_steps."


def _param_scheduler(step, max_lr, min_lr, lr_warmup_steps, lr_decay_steps):
    if lr_warmup_steps > 0 and step <= lr_warmup_steps:
        return max_lr * step / lr_warmup_steps
    if step > lr_decay_steps:
        return min_lr
    frac = (step - lr_warmup_steps) / (lr_decay_steps - lr_warmup_steps)
    return min_lr + (max_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * frac))


def broken(step, lr=1e-3, min_lr=0.0, warmup_steps=22, total_train_steps=220):
    return _param_scheduler(step, lr, min_lr, warmup_steps, total_train_steps - warmup_steps)


def right(step, lr=1e-3, min_lr=0.0, warmup_steps=22, total_train_steps=220):
    return _param_scheduler(step, lr, min_lr, warmup_steps, total_train_steps)


def make(seed):
    return {"step": 100 + seed}


if __name__ == "__main__":
    for s in (0, 11, 22, 100, 150, 198, 210, 219, 220):
        print(s, broken(s), right(s))
    x = make(0)
    assert broken(**x) != right(**x) and broken(205) == 0.0 < right(205)

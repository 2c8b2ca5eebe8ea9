"""A fresh schedule after resume is sized by the wrong step. PrimeIntellect-ai/prime-rl#3268 (review finding), https://github.com/PrimeIntellect-ai/prime-rl/pull/3268, 2026.
With skip_scheduler the SFT trainer builds a new schedule for the remaining steps. It took them from resume.step, which is unset for a bare --resume (newest checkpoint); the step that was really loaded was known but not used.
The horizon was then all max_steps, so the cosine stayed far above its end value when training stopped."""
import math
import random

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "global step, from checkpoint_step to max_steps"}
SETTINGS = {"base_lr": "peak learning rate, 1e-3", "warmup": "warm-up steps of the fresh schedule, 5", "max_steps": "last global step of the run, 100", "resume_step": "step that the user asked to resume from, None for 'the newest'", "checkpoint_step": "step of the checkpoint that was loaded, 60 (0 if none)"}
NOTES = "The scheduler state is not restored (skip_scheduler): linear warm-up from 0, then cosine to 0 over the steps that are left, counted from the loaded checkpoint. Ends at 0 at max_steps. resume_step, if given, equals checkpoint_step."


def make(seed):
    rng = random.Random(seed)
    ck = rng.choice([40, 60, 80])
    return {"step": rng.randint(ck + 10, 100), "base_lr": 1e-3, "warmup": 5, "max_steps": 100, "resume_step": None, "checkpoint_step": ck}


def _cosine(count, base_lr, warmup, horizon):
    if count < warmup:
        return base_lr * count / warmup
    t = min(1.0, (count - warmup) / max(1, horizon - warmup))
    return base_lr * 0.5 * (1 + math.cos(math.pi * t))


def broken(step, base_lr=1e-3, warmup=5, max_steps=100, resume_step=None, checkpoint_step=60):
    horizon = max_steps - resume_step if resume_step is not None else max_steps
    return _cosine(step - checkpoint_step, base_lr, warmup, horizon)


def right(step, base_lr=1e-3, warmup=5, max_steps=100, resume_step=None, checkpoint_step=60):
    horizon = max_steps - checkpoint_step
    return _cosine(step - checkpoint_step, base_lr, warmup, horizon)


if __name__ == "__main__":
    m = make(0)
    print(m["step"], "broken", broken(**m), "right", right(**m))
    m["step"] = 100
    print("last step: broken", broken(**m), "right", right(**m))
    assert right(**m) < 1e-12 < 1e-5 < broken(**m)
    assert broken(100, resume_step=60) == right(100, resume_step=60)

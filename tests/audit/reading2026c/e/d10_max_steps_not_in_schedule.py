"""Schedule length taken from the epochs although max_steps ends the run. vllm-project/speculators#1104,
https://github.com/vllm-project/speculators/pull/1104, 2026. With max_steps set the trainer stops early, but the LR
schedule was still built for num_epochs * len(loader) steps: cosine and linear decay never came near their end and the
LR stayed too high for the whole run. The fix uses max_steps as the total when it is set."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"base_lr": "peak LR, 1e-3", "warmup": "warmup steps, 10", "num_epochs": "epochs asked for, 5",
            "steps_per_epoch": "optimizer steps of an epoch, 100", "max_steps": "the run stops after so many steps, 120; None = off",
            "scheduler_total_steps": "explicit length of the schedule, None"}
NOTES = "Linear warmup from 0, then cosine to 0 at the last step of the run; the run ends at max_steps when it is set."
import math


def make(seed):
    return {"step": [100, 60, 115][seed % 3]}


def _lr(step, base_lr, warmup, total):
    if step < warmup:
        return base_lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return base_lr * 0.5 * (1 + math.cos(math.pi * progress))


def broken(step, base_lr=1e-3, warmup=10, num_epochs=5, steps_per_epoch=100, max_steps=120, scheduler_total_steps=None):
    total = scheduler_total_steps or num_epochs * steps_per_epoch
    return _lr(step, base_lr, warmup, total)


def right(step, base_lr=1e-3, warmup=10, num_epochs=5, steps_per_epoch=100, max_steps=120, scheduler_total_steps=None):
    total = scheduler_total_steps or max_steps or num_epochs * steps_per_epoch
    return _lr(step, base_lr, warmup, total)


if __name__ == "__main__":
    print([round(broken(s), 6) for s in range(0, 121, 20)])
    print([round(right(s), 6) for s in range(0, 121, 20)])
    assert broken(**make(0)) != right(**make(0))

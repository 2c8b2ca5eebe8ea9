"""Scheduler horizon from the unsharded dataloader. huggingface/diffusers#14542 (tracker #8384), https://github.com/huggingface/diffusers/pull/14542, 2026.
With --num_train_epochs the warmup and the horizon of the scheduler were computed from the dataloader before sharding and multiplied by
the accumulation steps, while the prepared scheduler ticks num_processes times per optimizer step. The warmup had the wrong length and
the cosine was cut off long before its end (or ended too early)."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"lr": "peak learning rate, 1e-4", "warmup": "warmup, 10 optimizer steps", "epochs": "epochs, 3",
            "batches": "batches per epoch over all processes, 240", "accumulation": "micro-batches per optimizer step, 4", "processes": "processes, 2"}
NOTES = ("Linear warmup from 0, then half a cosine to 0 at the last optimizer step. The scheduler object ticks `processes` times per optimizer "
         "step (accelerate without split_batches), so the position is step * processes. The run has epochs * ceil(ceil(batches / processes) / accumulation) "
         "= 90 optimizer steps.")
import math


def cosine(tick, warmup, total):
    if tick < warmup:
        return tick / max(1, warmup)
    p = (tick - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * min(1.0, p))))


def make(seed):
    return {"step": [45, 5, 10, 89, 0][seed % 5]}


def broken(step, lr=1e-4, warmup=10, epochs=3, batches=240, accumulation=4, processes=2):
    updates_per_epoch = math.ceil(batches / accumulation)
    max_train_steps = epochs * updates_per_epoch
    return lr * cosine(step * processes, warmup * accumulation, max_train_steps * accumulation)


def right(step, lr=1e-4, warmup=10, epochs=3, batches=240, accumulation=4, processes=2):
    sharded = math.ceil(batches / processes)
    updates_per_epoch = math.ceil(sharded / accumulation)
    total = epochs * updates_per_epoch * processes
    return lr * cosine(step * processes, warmup * processes, total)


if __name__ == "__main__":
    for s in (0, 5, 10, 45, 89):
        print(s, broken(s), right(s))
    assert right(10) == 1e-4 and right(90) < 1e-12 and broken(89) > 1e-5

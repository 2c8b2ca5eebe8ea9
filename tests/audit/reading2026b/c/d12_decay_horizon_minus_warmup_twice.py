"""Warmup is taken off the decay horizon twice. huggingface/nanotron#423, https://github.com/huggingface/nanotron/pull/423, 2026.
When lr_decay_steps is not given it is derived from the number of training steps. The code subtracted the warmup steps and then also lr_decay_starting_step,
which is an absolute step that already lies after the warmup. The decay ended early by the length of the warmup and the rest of the run stayed at the minimum."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"lr": "peak 1e-3", "min_lr": "1e-5", "warmup": "100 steps, linear from 0", "decay_start": "absolute step where the linear decay begins, 500", "total": "training steps, 1000"}
NOTES = "Linear warmup, constant peak until decay_start, then linear decay that reaches min_lr exactly at the last training step (total)."


def make(seed):
    return {"step": [0, 50, 100, 499, 500, 700, 899, 950, 1000][seed % 9]}


def value(step, decay_steps, lr, min_lr, warmup, decay_start):
    if step < warmup:
        return lr * step / warmup
    if step < decay_start:
        return lr
    if step >= decay_start + decay_steps:
        return min_lr
    return min_lr + (lr - min_lr) * (decay_start + decay_steps - step) / decay_steps


def broken(step, lr=1e-3, min_lr=1e-5, warmup=100, decay_start=500, total=1000):
    decay_steps = total
    if warmup is not None:
        decay_steps -= warmup
    if decay_start is not None:
        decay_steps -= decay_start
    return value(step, decay_steps, lr, min_lr, warmup, decay_start)


def right(step, lr=1e-3, min_lr=1e-5, warmup=100, decay_start=500, total=1000):
    decay_steps = total - (decay_start if decay_start is not None else warmup)
    return value(step, decay_steps, lr, min_lr, warmup, decay_start)


if __name__ == "__main__":
    for s in (0, 100, 500, 700, 899, 900, 950, 1000):
        print(s, round(broken(s), 7), round(right(s), 7))
    assert broken(900) == 1e-5 < right(900) and right(1000) == 1e-5

"""The scheduler is stepped for each micro-batch, the optimizer only once per accumulation window.
starVLA/starVLA#210, https://github.com/starVLA/starVLA/pull/210 (issue #204), 2026 (March).
lr_scheduler.step() stands inside accelerator.accumulate() without a check of sync_gradients. The
schedule runs gradient_accumulation_steps times too fast, and after a resume, which replays
optimizer steps, the rate jumps."""
import math
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'schedules'
KIND = 'schedule'
INPUTS = {
    'step': 'optimizer step, counted from 0',
}
SETTINGS = {
    'peak': 'peak learning rate, 1e-3',
    'warmup': 'warm-up optimizer steps, 4',
    'total': 'optimizer steps of the run, 24',
    'accumulation': 'micro-batches per optimizer step, 4',
}
NOTES = (
    'Learning rate used by optimizer step `step`: linear warm-up from peak/warmup to peak over the '
    'warm-up steps, then cosine to 0 at `total`. All numbers are in optimizer steps, independent of '
    'the accumulation. '
)


def make(seed):
    return {"step": 6 + seed % 10}


def _factor(warmup, total):
    def f(s):
        if s < warmup:
            return (s + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (s - warmup) / (total - warmup))))
    return f


def _train(step, peak, warmup, total, accumulation, only_on_sync):
    p = nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], lr=peak)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, _factor(warmup, total))
    done = 0
    for micro in range(total * accumulation):
        (p.sum() / accumulation).backward()
        sync = (micro + 1) % accumulation == 0
        if sync:
            if done == step:
                return opt.param_groups[0]["lr"]
            opt.step()
            opt.zero_grad()
            done += 1
        if sync or not only_on_sync:
            sched.step()
    return opt.param_groups[0]["lr"]


def broken(step, peak=1e-3, warmup=4, total=24, accumulation=4):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _train(step, peak, warmup, total, accumulation, only_on_sync=False)


def right(step, peak=1e-3, warmup=4, total=24, accumulation=4):
    return _train(step, peak, warmup, total, accumulation, only_on_sync=True)


if __name__ == "__main__":
    for s in (0, 2, 4, 6, 12, 23):
        print(s, "broken", broken(s), "right", right(s), "formula", 1e-3 * _factor(4, 24)(s))
        assert abs(right(s) - 1e-3 * _factor(4, 24)(s)) < 1e-9
    assert abs(broken(6) - right(6)) > 1e-4

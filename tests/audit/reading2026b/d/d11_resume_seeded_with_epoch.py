"""A resumed scheduler is seeded with the epoch index although it counts optimizer steps.
vllm-project/speculators#900, https://github.com/vllm-project/speculators/pull/900, 2026 (August).
When no scheduler state was saved, setup_optimizer passes last_epoch = previous_epoch to the
warm-up schedules. They step once per optimizer step, so the resumed run stands at the start of the
warm-up: a rate near zero, then a second warm-up and decay on a trained model."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'schedules'
KIND = 'schedule'
INPUTS = {
    'step': 'global optimizer step, counted from 0',
}
SETTINGS = {
    'peak': 'peak learning rate, 1e-3',
    'warmup': 'warm-up steps, 10',
    'total': 'steps of the whole run, 100',
    'steps_per_epoch': 'optimizer steps per epoch, 20',
    'resume_at': 'global step at which the run was resumed from a checkpoint without scheduler state, 60',
}
NOTES = (
    'Learning rate of global step `step` in a run that was stopped and resumed: linear warm-up, '
    'linear decay to 0 at `total`, the same as for a run without a break. '
)


def make(seed):
    return {"step": 62 + seed % 30}


def _scheduler(peak, warmup, total, last_epoch):
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    for g in opt.param_groups:
        g.setdefault("initial_lr", peak)
    f = lambda s: s / warmup if s < warmup else max(0.0, (total - s) / (total - warmup))
    return opt, torch.optim.lr_scheduler.LambdaLR(opt, f, last_epoch=last_epoch)


def _lr(step, peak, warmup, total, resume_at, seeded):
    start, last = (0, -1) if step < resume_at else (resume_at, seeded)
    opt, sched = _scheduler(peak, warmup, total, last)
    for _ in range(step - start):
        opt.step()
        sched.step()
    return opt.param_groups[0]["lr"]


def broken(step, peak=1e-3, warmup=10, total=100, steps_per_epoch=20, resume_at=60):
    previous_epoch = resume_at // steps_per_epoch - 1
    return _lr(step, peak, warmup, total, resume_at, previous_epoch)


def right(step, peak=1e-3, warmup=10, total=100, steps_per_epoch=20, resume_at=60):
    return _lr(step, peak, warmup, total, resume_at, resume_at - 1)


if __name__ == "__main__":
    for s in (5, 30, 59, 60, 65, 80, 99):
        whole = _lr(s, 1e-3, 10, 100, 10**9, None)
        print(s, "broken", broken(s), "right", right(s), "without a break", whole)
        assert abs(right(s) - whole) < 1e-9
    assert abs(broken(62) - right(62)) > 1e-5

"""Momentum of the one-cycle policy. Momentum falls while the rate rises and rises while the rate falls (0.95 -> 0.85 -> 0.95), the reverse of a usual warmup; Smith 2018 and torch's OneCycleLR(cycle_momentum=True) do this to keep the effective step lr / (1 - momentum) in bounds."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from 0, below total"}
SETTINGS = {"total": "all steps, 200", "pct_start": "share of the run in which the rate rises, 0.3", "high": "momentum at both ends, 0.95", "low": "momentum at the peak of the rate, 0.85"}
NOTES = ("Returns the momentum (Adam: beta1), not the rate. Turning point at step pct_start * total - 1 (the -1 is torch's convention, both ends are reached "
         "exactly). Defined for 0 <= step <= total - 1 only; raises beyond it, as torch does.")
import math


def right(step, total=200, pct_start=0.3, high=0.95, low=0.85):
    if not 0 <= step <= total - 1:
        raise ValueError("step outside of the run")
    turn, last = pct_start * total - 1, total - 1
    if step <= turn:
        a, b, x = high, low, step / turn
    else:
        a, b, x = low, high, (step - turn) / (last - turn)
    return b + (a - b) / 2 * (1 + math.cos(math.pi * x))


def make(seed):
    import random
    return {"step": random.Random(seed).randrange(200)}


if __name__ == "__main__":
    import torch
    p = torch.nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    sch = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=200, pct_start=0.3, base_momentum=0.85, max_momentum=0.95)
    worst, lrs = 0, []
    for t in range(200):
        worst = max(worst, abs(opt.param_groups[0]["momentum"] - right(t)))
        lrs.append(opt.param_groups[0]["lr"])
        opt.step()
        if t < 199:
            sch.step()
    assert worst < 1e-12 and lrs.index(max(lrs)) == min(range(200), key=right) == 59
    print("largest difference from torch OneCycleLR", worst, "ends", right(0), right(59), right(199))

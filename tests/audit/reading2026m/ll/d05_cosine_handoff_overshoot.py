"""The hand-over from warmup to the cosine overshoots the peak. deepseek-ai/DeepSpec#32,
https://github.com/deepseek-ai/DeepSpec/issues/32, 2026. At the end of the warmup the wrapper delegates to the chainable (recursive) form of the
cosine while its counter is 0 and the optimizer already stands at the peak. The recursion multiplies the current rate by
(1+cos 0)/(1+cos(-pi/T)) = 2/(1+cos(pi/T)) instead of returning the peak: 2.5 % too high for T = 10, and all later rates inherit the factor."""
import math
import torch
from torch.optim.lr_scheduler import LRScheduler

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"optimizer": "a torch optimizer whose groups carry their peak learning rate"}
SETTINGS = {"warmup_steps": "number of warmup updates, 4", "total_steps": "number of all updates, 14", "eta_min": "rate at the end of the cosine, 0.0"}
VALUES = {"warmup_steps": 4, "total_steps": 14, "eta_min": 0.0}
NOTES = """Makes a torch scheduler that is stepped once after every optimizer update. Update s (0-based) uses, per group with peak rate `base`:
base*(s+1)/(warmup_steps+1) for s < warmup_steps; then, with T = total_steps - warmup_steps and k = s - warmup_steps,
eta_min + (base - eta_min)*(1 + cos(pi*k/T))/2. So update number warmup_steps runs at exactly the peak, no update exceeds the peak, and the rate
falls monotonically to eta_min at s = total_steps, where it stays. The cosine is evaluated in chainable form (from the group's current rate), as in torch.
The scheduler changes only `lr`."""


def make(seed):
    torch.manual_seed(seed)
    p = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2))]
    return {"optimizer": torch.optim.SGD([{"params": [p[0]], "lr": 0.1}, {"params": [p[1]], "lr": 0.02}], lr=0.1)}


class _Cosine:
    """Chainable cosine: the next rate from the current one."""

    def __init__(self, T_max, eta_min):
        self.T_max, self.eta_min, self.last_epoch = T_max, eta_min, -1

    def get_lr(self, current):
        k, T, e = self.last_epoch, self.T_max, self.eta_min
        if k > T:
            return [e for _ in current]
        f = (1 + math.cos(math.pi * k / T)) / (1 + math.cos(math.pi * (k - 1) / T))
        return [f * (lr - e) + e for lr in current]


class _WarmupThenCosine(LRScheduler):
    def __init__(self, optimizer, warmup_steps, total_steps, eta_min):
        self.warmup_steps = warmup_steps
        self.after = _Cosine(total_steps - warmup_steps, eta_min)
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < self.warmup_steps:
            return [b * (self.last_epoch + 1) / (self.warmup_steps + 1) for b in self.base_lrs]
        self.after.last_epoch = self.last_epoch - self.warmup_steps
        if self.after.last_epoch == 0:
            return list(self.base_lrs)
        return self.after.get_lr([g["lr"] for g in self.optimizer.param_groups])


class _Delegating(_WarmupThenCosine):
    def get_lr(self):
        if self.last_epoch < self.warmup_steps:
            return [b * (self.last_epoch + 1) / (self.warmup_steps + 1) for b in self.base_lrs]
        self.after.last_epoch = self.last_epoch - self.warmup_steps
        if self.after.last_epoch == 0:
            for g, b in zip(self.optimizer.param_groups, self.base_lrs):
                g["lr"] = b
        return self.after.get_lr([g["lr"] for g in self.optimizer.param_groups])


def broken(optimizer, warmup_steps=4, total_steps=14, eta_min=0.0):
    return _Delegating(optimizer, warmup_steps, total_steps, eta_min)


def right(optimizer, warmup_steps=4, total_steps=14, eta_min=0.0):
    return _WarmupThenCosine(optimizer, warmup_steps, total_steps, eta_min)


if __name__ == "__main__":
    for f in (broken, right):
        i = make(0)
        s, rates = f(i["optimizer"], **VALUES), []
        for _ in range(15):
            rates.append([g["lr"] for g in i["optimizer"].param_groups])
            i["optimizer"].step(); s.step()
        want = [[b * (u + 1) / 5 if u < 4 else b * (1 + math.cos(math.pi * (u - 4) / 10)) / 2 for b in (0.1, 0.02)] for u in range(15)]
        print(f.__name__, [round(r[0], 5) for r in rates], "max error", max(abs(a - b) for x, y in zip(rates, want) for a, b in zip(x, y)))

"""Warmup start is applied to the first parameter group only. deepspeedai/DeepSpeed#7969, https://github.com/deepspeedai/DeepSpeed/pull/7969, 2026.
Before the first step the scheduler returned a list with a single 0.0, whatever the number of parameter groups. The values are applied with zip(param_groups, lrs),
so only group 0 was set; the other groups kept their full base learning rate and the first optimizer step ran with it."""
import math
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "an optimizer with two parameter groups, base learning rates 1e-3 and 1e-4"}
SETTINGS = {"total_num_steps": "20", "warmup_num_steps": "5", "warmup_min_ratio": "share of the base rate where warmup starts, 0.0", "cos_min_ratio": "share of the base rate at the end, 0.01"}
NOTES = "Makes a scheduler that is stepped after each optimizer step. Before the first step every group is at 0; then each group gets its own base rate times the same ratio (linear warmup, then cosine)."


class WarmupCosine:
    def __init__(self, optimizer, total_num_steps, warmup_num_steps, warmup_min_ratio, cos_min_ratio):
        self.optimizer, self.total, self.warm = optimizer, total_num_steps, warmup_num_steps
        self.warm_min, self.cos_min = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [g["lr"] for g in optimizer.param_groups]
        self.last = -1
        self.apply()

    def ratio(self):
        if self.last < self.warm:
            return self.warm_min + (1 - self.warm_min) * self.last / self.warm
        done = min(1.0, (self.last - self.warm + 1) / (self.total - self.warm))
        return max(0.0, self.cos_min + (1 - self.cos_min) * (1 + math.cos(math.pi * done)) / 2)

    def start_lrs(self):
        raise NotImplementedError

    def get_lr(self):
        if self.last < 0:
            return self.start_lrs()
        return [lr * self.ratio() for lr in self.org_lrs]

    def apply(self):
        for group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            group["lr"] = lr

    def step(self):
        self.last += 1
        self.apply()


class Broken(WarmupCosine):
    def start_lrs(self):
        return [0.0]


class Right(WarmupCosine):
    def start_lrs(self):
        return [0.0] * len(self.org_lrs)


def make(seed):
    torch.manual_seed(seed)
    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    return {"optimizer": torch.optim.SGD([{"params": a.parameters(), "lr": 1e-3}, {"params": b.parameters(), "lr": 1e-4}])}


def broken(optimizer, total_num_steps=20, warmup_num_steps=5, warmup_min_ratio=0.0, cos_min_ratio=0.01):
    return Broken(optimizer, total_num_steps, warmup_num_steps, warmup_min_ratio, cos_min_ratio)


def right(optimizer, total_num_steps=20, warmup_num_steps=5, warmup_min_ratio=0.0, cos_min_ratio=0.01):
    return Right(optimizer, total_num_steps, warmup_num_steps, warmup_min_ratio, cos_min_ratio)


if __name__ == "__main__":
    seen = {}
    for f in (broken, right):
        opt = make(0)["optimizer"]
        sched, rows = f(opt), []
        for _ in range(4):
            rows.append([g["lr"] for g in opt.param_groups])
            sched.step()
        seen[f.__name__] = rows
        print(f.__name__, rows)
    assert seen["broken"][0] != seen["right"][0] and seen["broken"][1:] == seen["right"][1:]

"""No warmup holds the whole run at the minimum learning rate. mlc-ai/pith-train#55, https://github.com/mlc-ai/pith-train/pull/55, 2026.
The scheduler always chained a linear warmup from min_lr with the decay phase. With warmup_steps = 0 the warmup phase still set the learning rate to min_lr at the start,
and the cosine phase, which computes each value from the one before, never left it. The run trained at min_lr from the first to the last step.
(The chain is written out here as older torch versions ran SequentialLR; torch 2.13 itself copes with a milestone at 0.)"""
import bisect
import math
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "an optimizer whose learning rate is max_lr"}
SETTINGS = {"max_lr": "peak, 1e-3", "min_lr": "floor, 1e-5", "warmup_steps": "0: no warmup (continuing from a checkpoint)", "max_steps": "100"}
NOTES = "Makes a scheduler with step(), called once after each optimizer step. Linear warmup from min_lr to max_lr over warmup_steps (none when 0), then cosine from max_lr to min_lr at max_steps."


class Warmup:
    def __init__(self, base, low, steps):
        self.base, self.low, self.steps, self.t = base, low, steps, 0

    def start(self):
        return self.low

    def next(self, lr):
        self.t += 1
        return self.low + (self.base - self.low) * min(1.0, self.t / max(1, self.steps))


class Cosine:
    def __init__(self, base, low, steps):
        self.base, self.low, self.steps, self.t = base, low, steps, 0

    def start(self):
        return self.base

    def next(self, lr):
        self.t += 1
        now, before = (1 + math.cos(math.pi * t / self.steps) for t in (self.t, self.t - 1))
        return now / before * (lr - self.low) + self.low


class Phases:
    def __init__(self, optimizer, phases, milestones):
        self.optimizer, self.phases, self.milestones, self.t = optimizer, phases, milestones, 0
        self.set(phases[0].start())

    def set(self, lr):
        for g in self.optimizer.param_groups:
            g["lr"] = lr

    def step(self):
        self.t += 1
        i = bisect.bisect_right(self.milestones, self.t)
        if i > 0 and self.milestones[i - 1] == self.t:
            self.set(self.phases[i].start())
        else:
            self.set(self.phases[i].next(self.optimizer.param_groups[0]["lr"]))


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=1e-3)}


def broken(optimizer, max_lr=1e-3, min_lr=1e-5, warmup_steps=0, max_steps=100):
    return Phases(optimizer, [Warmup(max_lr, min_lr, warmup_steps), Cosine(max_lr, min_lr, max_steps - warmup_steps)], [warmup_steps])


def right(optimizer, max_lr=1e-3, min_lr=1e-5, warmup_steps=0, max_steps=100):
    decay = Cosine(max_lr, min_lr, max_steps - warmup_steps)
    if warmup_steps == 0:
        return Phases(optimizer, [decay], [])
    return Phases(optimizer, [Warmup(max_lr, min_lr, warmup_steps), decay], [warmup_steps])


def trace(f, **kw):
    opt = make(0)["optimizer"]
    sched, lrs = f(opt, **kw), []
    for _ in range(100):
        lrs.append(opt.param_groups[0]["lr"])
        opt.step()
        sched.step()
    return lrs


if __name__ == "__main__":
    for f in (broken, right):
        lrs = trace(f)
        print(f.__name__, "first", lrs[0], "middle", lrs[50], "last", lrs[-1])
    want = [1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * t / 100)) for t in range(100)]
    assert max(trace(broken)) < 2e-5 and max(abs(a - b) for a, b in zip(trace(right), want)) < 1e-9
    assert trace(broken, warmup_steps=10) == trace(right, warmup_steps=10)

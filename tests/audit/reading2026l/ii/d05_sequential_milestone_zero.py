"""SequentialLR starts with the wrong scheduler when the first milestone is 0. pytorch/pytorch#185872, https://github.com/pytorch/pytorch/issues/185872, 2026.
The constructor always initialises the learning rate with the first scheduler, whatever the milestones say, and the first step() then moves on to
the second scheduler without setting its start value. With zero warm-up steps the chain of recursive updates therefore starts from the warm-up's
start value, and the whole decay runs at that small rate."""
import math
import warnings
from bisect import bisect_right
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"optimizer": "SGD with one parameter group, learning rate 0.1 (the peak)"}
SETTINGS = {"warmup": "number of linear warm-up steps, 0 (no warm-up)", "total": "number of optimizer steps, 20", "start": "first factor of the warm-up, 0.01"}
NOTES = ("Makes a scheduler; scheduler.step() is called once after each optimizer step. For step t < warmup the rate rises linearly from "
         "start*peak (t = 0) to peak (t = warmup); from t = warmup on it is the cosine peak*(1+cos(pi*(t-warmup)/(total-warmup)))/2. warmup may be 0: then the run "
         "begins at the peak with the cosine. Both parts are the recursive torch schedulers, chained by a milestone at `warmup`.")


class _Chain(LRScheduler):
    def __init__(self, optimizer, schedulers, milestones, first):
        self.optimizer, self._schedulers, self._milestones = optimizer, schedulers, milestones
        self.last_epoch = 0
        for g in optimizer.param_groups:
            g["lr"] = g["initial_lr"]
        for s in schedulers:
            s.last_epoch -= 1
        schedulers[first]._initial_step()
        self._last_lr = schedulers[first].get_last_lr()

    def step(self, epoch=None):
        self.last_epoch += 1
        i = bisect_right(self._milestones, self.last_epoch)
        s = self._schedulers[i]
        if i > 0 and self._milestones[i - 1] == self.last_epoch:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                s.step(0)
        else:
            s.step()
        self._last_lr = s.get_last_lr()


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.randn(3))], lr=0.1)}


def _parts(optimizer, warmup, total, start):
    return [LinearLR(optimizer, start_factor=start, total_iters=max(warmup, 1)), CosineAnnealingLR(optimizer, T_max=total - warmup)]


def broken(optimizer, warmup=0, total=20, start=0.01):
    return _Chain(optimizer, _parts(optimizer, warmup, total, start), [warmup], first=0)


def right(optimizer, warmup=0, total=20, start=0.01):
    return _Chain(optimizer, _parts(optimizer, warmup, total, start), [warmup], first=bisect_right([warmup], 0))


if __name__ == "__main__":
    for w in (0, 5):
        for f in (broken, right):
            o = make(0)["optimizer"]
            s = f(o, warmup=w)
            lrs = []
            for t in range(20):
                lrs.append(o.param_groups[0]["lr"])
                o.step(); s.step()
            ref = [0.1 * (0.01 + 0.99 * t / w) if t < w else 0.05 * (1 + math.cos(math.pi * (t - w) / (20 - w))) for t in range(20)]
            print("warmup", w, f.__name__, [round(x, 4) for x in lrs[:8]], "max error", max(abs(a - b) for a, b in zip(lrs, ref)))

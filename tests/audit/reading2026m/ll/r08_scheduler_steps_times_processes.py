"""The accelerate convention for schedulers: with split_batches=False AcceleratedScheduler.step() advances the inner scheduler num_processes times per optimizer update, and the training script
therefore multiplies warmup and total by num_processes. Each of the two looks like a bug; together the rate per update is independent of the number of processes."""
import math
import torch
from torch.optim.lr_scheduler import LambdaLR

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"optimizer": "a torch optimizer with its peak rate"}
SETTINGS = {"warmup_updates": "number of warmup updates, 5", "total_updates": "number of all optimizer updates, 25", "num_processes": "number of data-parallel processes, 4"}
VALUES = {"warmup_updates": 5, "total_updates": 25, "num_processes": 4}
NOTES = """Makes the scheduler of a data-parallel run; its step() is called once after every optimizer update, on each process. Inner schedule: linear warmup, then linear decay to 0, counted in samples-like units of one process: its warmup and total are
num_processes times the numbers of updates, and step() advances it num_processes units. At update u (0-based) the rate is peak*u/warmup_updates for u < warmup_updates (update 0 has rate 0), else
peak*(total_updates-u)/(total_updates-warmup_updates), at least 0, whatever num_processes is. If the optimizer skipped its update (attribute step_was_skipped True), step() does nothing."""


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.randn(3))], lr=0.2)}


class _PerProcess:
    def __init__(self, scheduler, optimizer, num_processes):
        self.scheduler, self.optimizer, self.num_processes = scheduler, optimizer, num_processes

    def step(self):
        if getattr(self.optimizer, "step_was_skipped", False):
            return
        for _ in range(self.num_processes):
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state)


def right(optimizer, warmup_updates=5, total_updates=25, num_processes=4):
    warmup, total = warmup_updates * num_processes, total_updates * num_processes

    def factor(unit):
        if unit < warmup:
            return unit / max(1, warmup)
        return max(0.0, (total - unit) / max(1, total - warmup))

    return _PerProcess(LambdaLR(optimizer, factor), optimizer, num_processes)


if __name__ == "__main__":
    for n in (1, 4):
        i = make(0)
        s, rates = right(i["optimizer"], num_processes=n), []
        for _ in range(26):
            rates.append(i["optimizer"].param_groups[0]["lr"]); i["optimizer"].step(); s.step()
        ref = [0.2 * (u / 5 if u < 5 else (25 - u) / 20) for u in range(26)]
        print(n, [round(r, 4) for r in rates[:8]], "max error", max(abs(a - b) for a, b in zip(rates, ref)))

"""Cosine with warm restarts (SGDR, Loshchilov & Hutter 2017). The rate JUMPS back up at every restart, the periods double, and each peak is lower than the one
before by a factor. Built as a torch LambdaLR with a closed form (so that resuming at any step needs no replay)."""
FAMILY = "schedule"
KIND = "schedule"
INPUTS = {"optimizer": "any torch optimizer; its lr is the first peak"}
SETTINGS = {"first": "length of the first period, 10 steps", "mult": "growth of the periods, 2 (an integer above 1; mult-1 divides)", "fade": "factor of each new peak, 0.7", "floor": "lowest share of the peak, 0.01"}
NOTES = "Returns a torch scheduler to be stepped once per optimiser update. Not monotone by design. State is only last_epoch; the closed form gives the same rate after loading."
import math
import torch


def make(seed):
    p = torch.nn.Parameter(torch.zeros(2))
    return {"optimizer": torch.optim.SGD([p], lr=0.1)}


def right(optimizer, first=10, mult=2, fade=0.7, floor=0.01):
    def share(step):
        cycle = int(math.log(step * (mult - 1) / first + 1, mult) + 1e-9)
        start = first * (mult ** cycle - 1) // (mult - 1)
        x = (step - start) / (first * mult ** cycle)
        return fade ** cycle * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x)))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


if __name__ == "__main__":
    opt = make(0)["optimizer"]; sch = right(opt); got = []
    for _ in range(75):
        got.append(opt.param_groups[0]["lr"]); opt.step(); sch.step()
    want, length, peak = [], 10, 0.1
    while len(want) < 75:                     # slow: one period after the other
        want += [peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * t / length))) for t in range(length)]
        length *= 2; peak *= 0.7
    assert max(abs(a - b) for a, b in zip(got, want)) < 1e-9
    opt2 = make(0)["optimizer"]; s2 = right(opt2); s2.load_state_dict(sch.state_dict()); s2.step(); sch.step()
    assert s2.get_last_lr() == sch.get_last_lr()
    print("ok", got[9], got[10], got[30], got[70])

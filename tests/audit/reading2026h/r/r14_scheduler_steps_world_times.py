"""The scheduler is stepped as often as there are processes, after every optimizer step. As accelerate's
AcceleratedScheduler without split_batches: users compute the schedule's length from the unprepared loader, which counts
the batches of one process, so warmup and total are world times too long in optimizer steps; the wrapper makes up for it
by stepping world times. It also does nothing on an accumulation step."""
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "a torch optimizer whose rate is the peak"}
SETTINGS = {"world": "processes, 4", "single_warmup": "warmup in batches of one process, 40",
            "single_total": "batches of one process in the whole training, 400 (= 100 optimizer steps with 4 processes)"}
NOTES = ("Returns a scheduler-like object: step(stepped=True) once per optimizer step (stepped=False on an accumulation "
         "step), get_last_lr(). Per optimizer step the result is a warmup over 10 steps from 0 and linear decay to 0 at step "
         "100. The rate of the first optimizer step is 0. single_warmup and single_total should be multiples of world.")


class SteppedPerProcess:
    def __init__(self, scheduler, world):
        self.scheduler, self.world = scheduler, world

    def step(self, stepped=True):
        if not stepped:
            return
        for _ in range(self.world):
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1e-2)}


def right(optimizer, world=4, single_warmup=40, single_total=400):
    def factor(t):
        if t < single_warmup:
            return t / single_warmup
        return max(0.0, (single_total - t) / (single_total - single_warmup))
    return SteppedPerProcess(torch.optim.lr_scheduler.LambdaLR(optimizer, factor), world)


if __name__ == "__main__":
    opt = make(0)["optimizer"]
    s = right(opt)
    seen = []
    for k in range(100):
        s.step(stepped=False) if k else None
        seen.append(s.get_last_lr()[0])
        opt.step()
        s.step()
    want = [1e-2 * (k / 10 if k < 10 else (100 - k) / 90) for k in range(100)]
    print([round(x, 5) for x in seen[:12]], "... end", s.get_last_lr())
    assert max(abs(a - b) for a, b in zip(seen, want)) < 1e-12 and s.get_last_lr() == [0.0]

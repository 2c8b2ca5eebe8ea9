"""A scheduler that advances world_size times per optimizer step (Hugging Face accelerate, AcceleratedScheduler with split_batches=False).
The schedule was built for the length of the unsharded dataloader; with W ranks the loader is W times shorter, so each optimizer step
consumes W schedule steps. It does not step while gradients are only accumulated, nor when the loss scaler skipped the optimizer step."""
import math
import torch

FAMILY = "learning-rate and other schedules"
KIND = "schedule"
INPUTS = {"optimizer": "SGD with base rate 0.1 (from make)"}
SETTINGS = {"world": "ranks, 4", "warmup": "warmup in schedule steps = single-process optimizer steps, 8", "total": "all schedule steps, 80 (= 20 optimizer steps on 4 ranks)"}
NOTES = ("A function that makes a torch scheduler; the returned wrapper has step(sync, skipped), get_last_lr, state_dict, load_state_dict. "
         "`total` is counted in single-process steps, so a run with W ranks makes total/W optimizer steps (world should divide total; else the last steps are at 0). "
         "Linear warmup from 0, cosine to 0. Call step() after each micro-batch.")


class Stepper:
    def __init__(self, scheduler, world):
        self.scheduler, self.world = scheduler, world

    def step(self, sync=True, skipped=False):
        if not sync or skipped:
            return
        for _ in range(self.world):
            self.scheduler.step()

    def get_last_lr(self):
        return self.scheduler.get_last_lr()

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state)


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)}


def right(optimizer, world=4, warmup=8, total=80):
    def factor(s):
        if s < warmup:
            return s / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (s - warmup) / (total - warmup))))
    return Stepper(torch.optim.lr_scheduler.LambdaLR(optimizer, factor), world)


def run(world, accumulate=1, skip=()):
    opt = make(0)["optimizer"]
    p = opt.param_groups[0]["params"][0]
    sch, rates = right(opt, world), []
    for n in range(80 // world):
        for m in range(accumulate):
            sync = m == accumulate - 1
            if sync:
                rates.append(opt.param_groups[0]["lr"])
                p.grad = torch.ones_like(p)
                if n not in skip:
                    opt.step()
            sch.step(sync, n in skip)
    return rates, opt.param_groups[0]["lr"]


if __name__ == "__main__":
    one, end1 = run(1)
    for w in (2, 4, 8):
        many, end = run(w)
        assert len(many) == 80 // w and max(abs(a - b) for a, b in zip(many, one[::w])) < 1e-12 and abs(end) < 1e-12
        print(f"W={w}: {len(many)} steps, rates {[round(x, 4) for x in many[:4]]} ... end {end:.1e}")
    acc, _ = run(4, accumulate=3)
    assert acc == run(4)[0]
    skipped, _ = run(4, skip=(2,))
    assert skipped[:3] == acc[:3] and skipped[3:] == acc[2:-1]
    assert abs(acc[2] - 0.1) < 1e-12 and acc[0] == 0        # warmup of 8 schedule steps is over after 2 optimizer steps

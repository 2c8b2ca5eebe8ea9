"""The scheduler advances world-size ticks per optimizer step, and is built with world-size times as many. Hugging Face accelerate, AcceleratedScheduler(split_batches=False); see also transformers no_trainer scripts (huggingface/transformers#27872).
The user counts steps as in a single process; after sharding, each process sees 1/world of the batches, so each optimizer step stands for world ticks. total and warm-up are given in ticks. Micro-steps of gradient accumulation do not tick."""
import torch
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer steps done"}
SETTINGS = {"lr": "peak learning rate, 0.1", "warmup_steps": "warm-up in optimizer steps, 4", "total_steps": "optimizer steps of the run, 20", "world": "processes, 4", "accumulation": "micro-batches per optimizer step, 2"}
NOTES = "Linear warm-up, linear decay to 0 at total_steps. As a function of optimizer steps the result does not depend on world or accumulation. Implemented with a torch LambdaLR that ticks world times per optimizer step."

def make(seed):
    return {"step": 5 + seed}

class Prepared:
    def __init__(self, scheduler, world):
        self.scheduler, self.world = scheduler, world
    def step(self, optimizer_stepped):
        if not optimizer_stepped:
            return
        for _ in range(self.world):
            self.scheduler.step()

def right(step, lr=0.1, warmup_steps=4, total_steps=20, world=4, accumulation=2):
    w, t = warmup_steps * world, total_steps * world
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    lam = lambda k: k / w if k < w else max(0.0, (t - k) / (t - w))
    sched = Prepared(torch.optim.lr_scheduler.LambdaLR(opt, lam), world)
    for micro in range(step * accumulation):
        last = micro % accumulation == accumulation - 1
        if last:
            opt.step()
        sched.step(last)
    return opt.param_groups[0]["lr"]

if __name__ == "__main__":
    ref = lambda s: 0.1 * (s / 4 if s < 4 else max(0.0, (20 - s) / 16))
    for s in range(24):
        for world in (1, 2, 4):
            for acc in (1, 3):
                assert abs(right(s, world=world, accumulation=acc) - ref(s)) < 1e-9
    print([round(right(s), 5) for s in range(0, 22, 3)])

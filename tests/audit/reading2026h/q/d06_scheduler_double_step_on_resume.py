"""Learning-rate schedule advanced twice on resume. THUDM/slime#1547 (issue #1546), https://github.com/THUDM/slime/pull/1547, 2026.
Megatron's load_checkpoint() already calls opt_param_scheduler.load_state_dict(), which moves num_steps to the saved position. slime then called step(increment=iteration * global_batch_size) once more, so each resume doubled the position.
Training goes on without a message with the learning rate of a much later step. The fix removes the extra step()."""
import math
FAMILY = "schedules"
KIND = "state"
INPUTS = {"saved": "scheduler state dict of the checkpoint: {'num_steps': samples consumed}", "iteration": "optimizer steps done at the checkpoint", "more": "optimizer steps to run after the resume"}
SETTINGS = {"batch": "global batch size in samples, 8", "warmup": "warm-up in samples, 80", "total": "decay length in samples, 1600", "lr": "peak learning rate, 1e-3"}
NOTES = "Returns the list of learning rates of the next `more` optimizer steps after a resume. The schedule counts samples, one optimizer step adds `batch`. Linear warm-up, then cosine to 0. The scheduler object is new (num_steps 0) at the resume; load_state_dict advances it to the saved position. An unbroken run gives the reference."


class SampleScheduler:
    def __init__(self, warmup, total, lr):
        self.warmup, self.total, self.peak, self.num_steps = warmup, total, lr, 0

    def step(self, increment):
        self.num_steps += increment

    def lr(self):
        n = self.num_steps
        if n <= self.warmup:
            return self.peak * n / self.warmup
        f = min(1.0, (n - self.warmup) / (self.total - self.warmup))
        return self.peak * 0.5 * (1 + math.cos(math.pi * f))

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, sd):
        self.step(increment=sd["num_steps"])


def make(seed):
    it = 60 + seed % 5
    s = SampleScheduler(80, 1600, 1e-3)
    for _ in range(it):
        s.step(8)
    return {"saved": s.state_dict(), "iteration": it, "more": 5}


def _run(s, more, batch):
    out = []
    for _ in range(more):
        out.append(s.lr())
        s.step(batch)
    return out


def broken(saved, iteration, more, batch=8, warmup=80, total=1600, lr=1e-3):
    s = SampleScheduler(warmup, total, lr)
    s.load_state_dict(saved)
    s.step(increment=iteration * batch)
    return _run(s, more, batch)


def right(saved, iteration, more, batch=8, warmup=80, total=1600, lr=1e-3):
    s = SampleScheduler(warmup, total, lr)
    s.load_state_dict(saved)
    return _run(s, more, batch)


if __name__ == "__main__":
    d = make(0)
    s = SampleScheduler(80, 1600, 1e-3)
    unbroken = _run(s, d["iteration"] + d["more"], 8)[d["iteration"]:]
    b, r = broken(**d), right(**d)
    print("broken", b); print("right ", r)
    assert r == unbroken and b != unbroken

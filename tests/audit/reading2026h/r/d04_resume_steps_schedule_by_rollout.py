"""Resume advances the scheduler a second time, by the rollout number. THUDM/slime#1761,
https://github.com/THUDM/slime/issues/1761, 2026.
After loading a checkpoint the scheduler was stepped by iteration * global_batch_size, where the saved iteration is a
rollout id and not an optimizer step, and although the checkpoint had already restored the scheduler's own sample count.
Learning rate and weight decay after a resume are therefore those of a later point of the schedule."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, counted from the start of the first run, 0 ... total_steps - 1"}
SETTINGS = {"peak": "peak learning rate, 1e-3", "warmup_steps": "linear warmup, 10 optimizer steps",
            "total_steps": "optimizer steps of the whole training, 200", "global_batch_size": "samples per optimizer "
            "step, 32", "steps_per_rollout": "optimizer steps per rollout, 4",
            "saved_rollout": "the run was saved after this rollout and resumed, 9 (= after 40 optimizer steps)"}
NOTES = ("Learning rate used at an optimizer step of a run that was interrupted once: warmup, then cosine to zero. The "
         "scheduler counts samples. A resumed run must have the same rate at each step as one that was never stopped.")


class Scheduler:
    def __init__(self, peak, warmup, total):
        self.peak, self.warmup, self.total, self.num_steps = peak, warmup, total, 0

    def get_lr(self):
        if self.num_steps <= self.warmup:
            return self.peak * self.num_steps / self.warmup
        if self.num_steps > self.total:
            return 0.0
        return self.peak * 0.5 * (1 + math.cos(math.pi * (self.num_steps - self.warmup) / (self.total - self.warmup)))

    def step(self, increment):
        self.num_steps += increment

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


def _new(peak, warmup_steps, total_steps, global_batch_size):
    return Scheduler(peak, warmup_steps * global_batch_size, total_steps * global_batch_size)


def make(seed):
    return {"step": 60 + seed % 100}


def broken(step, peak=1e-3, warmup_steps=10, total_steps=200, global_batch_size=32, steps_per_rollout=4,
           saved_rollout=9):
    s = _new(peak, warmup_steps, total_steps, global_batch_size)
    done = (saved_rollout + 1) * steps_per_rollout
    for _ in range(min(step, done)):
        s.step(global_batch_size)
    if step >= done:
        checkpoint = {"iteration": saved_rollout, "scheduler": s.state_dict()}
        s = _new(peak, warmup_steps, total_steps, global_batch_size)
        s.load_state_dict(checkpoint["scheduler"])
        s.step(increment=checkpoint["iteration"] * global_batch_size)
        for _ in range(step - done):
            s.step(global_batch_size)
    return s.get_lr()


def right(step, peak=1e-3, warmup_steps=10, total_steps=200, global_batch_size=32, steps_per_rollout=4,
          saved_rollout=9):
    s = _new(peak, warmup_steps, total_steps, global_batch_size)
    done = (saved_rollout + 1) * steps_per_rollout
    for _ in range(min(step, done)):
        s.step(global_batch_size)
    if step >= done:
        checkpoint = {"iteration": saved_rollout, "scheduler": s.state_dict()}
        s = _new(peak, warmup_steps, total_steps, global_batch_size)
        s.load_state_dict(checkpoint["scheduler"])
        for _ in range(step - done):
            s.step(global_batch_size)
    return s.get_lr()


if __name__ == "__main__":
    for t in (make(0)["step"], 10, 39, 40, 195, 199):
        print(t, broken(t), right(t), right(t, saved_rollout=49))
    assert broken(**make(0)) != right(**make(0))
    assert all(abs(right(t) - right(t, saved_rollout=49)) < 1e-12 for t in range(200))

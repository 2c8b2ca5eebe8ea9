"""After a resume the learning-rate schedule is as far along as twice the progress. radixark/miles#1627, https://github.com/radixark/miles/pull/1627
(the same in THUDM/slime#1547), 2026. Loading the checkpoint restores the scheduler's counter; the initialization then also steps it by
iteration * global_batch_size, as is needed when nothing was restored. The resumed run continues with a far too small learning rate."""
import math

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the optimizer update, 0, 1, ... 99"}
SETTINGS = {"peak": "peak learning rate, 0.001", "floor": "final learning rate, 0.0001", "warmup": "warmup updates, 10", "total": "updates of the run, 100",
            "batch": "rows per update, 8; the schedule counts rows", "resume_at": "update before which the run was saved and loaded again, 40"}
NOTES = "Linear warmup, then cosine to the floor. Returns the rate used at this update by a run that is saved and loaded once; it must be that of the run without a break."

class Scheduler:
    def __init__(self, peak, floor, warmup, total):
        self.peak, self.floor, self.warmup, self.total, self.rows = peak, floor, warmup, total, 0

    def step(self, increment):
        self.rows += increment

    def lr(self):
        if self.rows < self.warmup:
            return self.peak * self.rows / self.warmup
        if self.rows >= self.total:
            return self.floor
        done = (self.rows - self.warmup) / (self.total - self.warmup)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.step(increment=state["rows"])

def make(seed):
    return {"step": 55 + seed % 10}

def run(step, peak, floor, warmup, total, batch, resume_at, after_load):
    new = lambda: Scheduler(peak, floor, warmup * batch, total * batch)
    scheduler = new()
    for update in range(step + 1):
        if update == resume_at:
            state, scheduler = scheduler.state_dict(), new()
            scheduler.load_state_dict(state)
            after_load(scheduler, update)
        lr = scheduler.lr()
        scheduler.step(batch)
    return lr

def broken(step, peak=1e-3, floor=1e-4, warmup=10, total=100, batch=8, resume_at=40):
    return run(step, peak, floor, warmup, total, batch, resume_at, lambda s, iteration: s.step(increment=iteration * batch))

def right(step, peak=1e-3, floor=1e-4, warmup=10, total=100, batch=8, resume_at=40):
    def after_load(s, iteration):
        if s.rows == 0:  # nothing was restored
            s.step(increment=iteration * batch)
    return run(step, peak, floor, warmup, total, batch, resume_at, after_load)

if __name__ == "__main__":
    for step in (39, 40, 55, 70):
        print(step, "broken", round(broken(step), 7), "right", round(right(step), 7), "no break", round(right(step, resume_at=10**9), 7))
        assert right(step) == right(step, resume_at=10**9)
    assert broken(**make(0)) < 0.5 * right(**make(0)) and broken(39) == right(39)

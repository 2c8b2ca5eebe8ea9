"""Weight decay of the parameter groups is stale after the scheduler is loaded. NVIDIA/Megatron-LM#7468, https://github.com/NVIDIA/Megatron-LM/pull/7468, 2026.
load_state_dict of the joint lr / weight-decay scheduler called step(), which writes lr and weight decay into all parameter groups, before it had restored
start_wd, end_wd and wd_incr_steps from the checkpoint. After a resume with other constructor arguments the groups hold the checkpoint's
learning rate but the weight decay of the constructor, and the first optimizer step runs with it. The fix calls step() last."""
import torch

FAMILY = "schedules"
KIND = "state"
INPUTS = {"optimizer": "torch optimizer whose groups get 'lr' and 'weight_decay' from the scheduler"}
SETTINGS = {"max_lr": "peak lr, 1e-2", "warmup": "linear warmup steps, 5", "decay_steps": "step at which the lr reaches 0 linearly, 40",
            "start_wd": "weight decay at step 0, 0.0", "end_wd": "weight decay at wd_steps, 0.1", "wd_steps": "linear weight-decay ramp in steps, 20"}
NOTES = ("broken/right build the scheduler: attributes max_lr … wd_steps and num_steps, step(increment=1), state_dict(), load_state_dict(). Checkpoint values win over constructor "
         "arguments for all settings. The training loop calls optimizer.step() before scheduler.step(), so that the groups right after loading are what the next step uses.")


class _Scheduler:
    names = ("max_lr", "warmup", "decay_steps", "start_wd", "end_wd", "wd_steps")

    def __init__(self, optimizer, **settings):
        self.optimizer, self.num_steps = optimizer, 0
        for name in self.names:
            setattr(self, name, settings[name])
        self.step(0)

    def get_lr(self):
        if self.num_steps < self.warmup:
            return self.max_lr * self.num_steps / self.warmup
        left = self.decay_steps - self.num_steps
        return self.max_lr * max(0.0, left / (self.decay_steps - self.warmup))

    def get_wd(self):
        share = min(1.0, self.num_steps / self.wd_steps)
        return self.start_wd + share * (self.end_wd - self.start_wd)

    def step(self, increment=1):
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.get_lr(), self.get_wd()

    def state_dict(self):
        return {name: getattr(self, name) for name in self.names} | {"num_steps": self.num_steps}


class _BrokenScheduler(_Scheduler):
    def load_state_dict(self, state):
        self.max_lr, self.warmup, self.decay_steps = state["max_lr"], state["warmup"], state["decay_steps"]
        self.num_steps = 0
        self.step(increment=state["num_steps"])
        self.start_wd, self.end_wd, self.wd_steps = state["start_wd"], state["end_wd"], state["wd_steps"]


class _RightScheduler(_Scheduler):
    def load_state_dict(self, state):
        self.max_lr, self.warmup, self.decay_steps = state["max_lr"], state["warmup"], state["decay_steps"]
        self.start_wd, self.end_wd, self.wd_steps = state["start_wd"], state["end_wd"], state["wd_steps"]
        self.num_steps = 0
        self.step(increment=state["num_steps"])


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    return {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.0)}


def broken(optimizer, max_lr=1e-2, warmup=5, decay_steps=40, start_wd=0.0, end_wd=0.1, wd_steps=20):
    return _BrokenScheduler(optimizer, max_lr=max_lr, warmup=warmup, decay_steps=decay_steps, start_wd=start_wd, end_wd=end_wd, wd_steps=wd_steps)


def right(optimizer, max_lr=1e-2, warmup=5, decay_steps=40, start_wd=0.0, end_wd=0.1, wd_steps=20):
    return _RightScheduler(optimizer, max_lr=max_lr, warmup=warmup, decay_steps=decay_steps, start_wd=start_wd, end_wd=end_wd, wd_steps=wd_steps)


if __name__ == "__main__":
    wd = {}
    for f in (broken, right):
        first = f(make(0)["optimizer"])
        for _ in range(12):
            first.step()
        want = first.optimizer.param_groups[0]["weight_decay"]
        second = f(make(0)["optimizer"], start_wd=0.01, end_wd=0.01, wd_steps=1, max_lr=5e-3)
        second.load_state_dict(first.state_dict())
        group = second.optimizer.param_groups[0]
        wd[f.__name__] = group["weight_decay"]
        print(f.__name__, "lr", group["lr"], "weight decay", group["weight_decay"], "saved run had", want)
        assert group["lr"] == first.optimizer.param_groups[0]["lr"]
    assert abs(wd["right"] - want) < 1e-12 and abs(wd["broken"] - want) > 1e-3

"""The schedule's length is counted in rollouts but it is stepped once per optimizer update. songmzhang/KDFlow#4,
https://github.com/songmzhang/KDFlow/issues/4, 2026. In on-policy distillation each rollout gives several optimizer updates. The scheduler was built with the
number of rollout steps and stepped per update, so the rate is at its floor after a fraction of the run."""
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "index of the optimizer update, 0 ... rollouts * updates_per_rollout - 1"}
SETTINGS = {"lr": "peak learning rate, 0.00002", "rollouts": "rollout steps of the run, 25", "rollout_batch": "prompts per rollout, 64",
            "train_batch": "prompts per optimizer update, 16; it divides rollout_batch", "warmup_ratio": "share of the run used for warmup, 0.04", "floor": "lowest rate as a share of the peak, 0.1"}
NOTES = "Linear warmup from 0, then linear decay to floor * lr at the end of the run; torch LambdaLR stepped after each optimizer update. Returns the rate used at update `step`."

def make(seed):
    return {"step": 30 + seed % 20}

def make_scheduler(optimizer, total, warmup_ratio, floor):
    warmup = max(1, round(total * warmup_ratio))
    def factor(s):
        if s < warmup:
            return s / warmup
        return max(floor, 1 - (1 - floor) * (s - warmup) / max(1, total - warmup))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

def rate(step, lr, total, warmup_ratio, floor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(optimizer, total, warmup_ratio, floor)
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]

def broken(step, lr=2e-5, rollouts=25, rollout_batch=64, train_batch=16, warmup_ratio=0.04, floor=0.1):
    return rate(step, lr, rollouts, warmup_ratio, floor)

def right(step, lr=2e-5, rollouts=25, rollout_batch=64, train_batch=16, warmup_ratio=0.04, floor=0.1):
    return rate(step, lr, rollouts * (rollout_batch // train_batch), warmup_ratio, floor)

if __name__ == "__main__":
    for step in (0, 4, 20, 30, 99):
        print(step, "broken", broken(step), "right", right(step))
    assert abs(broken(30) - 2e-6) < 1e-12 and right(30) > 1e-5

"""inverse_sqrt schedule drops its own arguments. huggingface/transformers#44908 (fix #44909),
https://github.com/huggingface/transformers/pull/44909, 2026. get_scheduler built the inverse_sqrt schedule without passing
scheduler_specific_kwargs on, so a timescale given by the user (lr_scheduler_kwargs) was ignored and the default,
the number of warm-up steps, was used. The learning rate fell much faster than asked for."""
import torch
from torch.optim.lr_scheduler import LambdaLR
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "torch optimizer with one parameter group"}
SETTINGS = {"num_warmup_steps": "warm-up steps, 10", "scheduler_specific_kwargs": "{'timescale': 1000}: steps after which the "
            "inverse square root has begun to bite"}
NOTES = ("Makes a torch scheduler: linear warm-up from 0, then 1/sqrt((step + timescale - warmup) / timescale). The timescale "
         "defaults to the warm-up steps only if the user gives none.")

def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)}

def inverse_sqrt(optimizer, num_warmup_steps, timescale=None):
    if timescale is None:
        timescale = num_warmup_steps or 10_000
    shift = timescale - num_warmup_steps
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return 1.0 / ((step + shift) / timescale) ** 0.5
    return LambdaLR(optimizer, factor)

def broken(optimizer, num_warmup_steps=10, scheduler_specific_kwargs={"timescale": 1000}):
    name = "inverse_sqrt"
    if name == "inverse_sqrt":
        return inverse_sqrt(optimizer, num_warmup_steps=num_warmup_steps)

def right(optimizer, num_warmup_steps=10, scheduler_specific_kwargs={"timescale": 1000}):
    name = "inverse_sqrt"
    if name == "inverse_sqrt":
        return inverse_sqrt(optimizer, num_warmup_steps=num_warmup_steps, **scheduler_specific_kwargs)

def _curve(f):
    opt = make(0)["optimizer"]
    sched, out = f(opt), []
    for _ in range(200):
        out.append(opt.param_groups[0]["lr"])
        opt.step()
        sched.step()
    return out

if __name__ == "__main__":
    b, r = _curve(broken), _curve(right)
    print("learning rate at steps 5, 50, 199:", [b[i] for i in (5, 50, 199)], [r[i] for i in (5, 50, 199)])
    assert b[5] == r[5] and b[199] < 0.5 * r[199]

"""Jagged cosine of ReLoRA (arXiv 2307.05695; peft_pretraining): the rate goes to zero at each merge and is warmed up again to the cosine.
Every `cycle` steps the adapters are merged and the optimizer state is reset. There the rate is set to 0 and rises linearly over `restart_warmup` steps to
the value of the global cosine at that step, not to the peak. The first cycle has only the first warmup. The curve is neither monotonic nor smooth."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"lr": "peak, 1e-3", "first_warmup": "first warmup, 20 steps", "cycle": "steps between merges, 50", "restart_warmup": "warmup after a merge, 5 steps", "total": "steps, 200", "floor": "cosine floor as a fraction, 0.1"}
NOTES = "The rate is exactly 0 at steps 0, 50, 100, 150. The envelope is half a cosine from the peak at first_warmup to floor * lr at total. Made as a torch LambdaLR in `scheduler`."
import math
import torch


def make(seed):
    return {"step": [102, 0, 50, 75, 199][seed % 5]}


def right(step, lr=1e-3, first_warmup=20, cycle=50, restart_warmup=5, total=200, floor=0.1):
    if step < first_warmup:
        return lr * step / first_warmup
    x = min(1.0, (step - first_warmup) / (total - first_warmup))
    envelope = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))
    since = step % cycle
    if step >= cycle and since < restart_warmup:
        return lr * envelope * since / restart_warmup
    return lr * envelope


def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: right(s, lr=1.0))


if __name__ == "__main__":
    c = [right(s) for s in range(200)]
    print([round(x, 7) for x in (c[0], c[20], c[49], c[50], c[52], c[55], c[100], c[199])])
    assert [s for s, x in enumerate(c) if x == 0] == [0, 50, 100, 150] and c[20] == 1e-3
    assert all(c[s] < c[s - 1] for s in range(21, 200) if s % 50 > 5)
    p = torch.nn.Parameter(torch.zeros(1))
    o = torch.optim.SGD([p], lr=1e-3)
    sch = scheduler(o)
    for s in range(120):
        assert abs(o.param_groups[0]["lr"] - c[s]) < 1e-12
        o.step()
        sch.step()

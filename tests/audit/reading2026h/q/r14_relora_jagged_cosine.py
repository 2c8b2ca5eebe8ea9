"""ReLoRA's jagged cosine as a torch scheduler: a short new warm-up after each merge of the adapter. Lialin et al. 2023, "ReLoRA: High-Rank Training Through Low-Rank Updates".
The rate drops to near zero in the middle of training every `cycle` steps and climbs back to the global cosine in `rewarm` steps, since the optimizer state was pruned at the merge. The cosine itself goes on underneath and is not restarted."""
import math
import torch
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "a torch optimizer whose lr is the peak"}
SETTINGS = {"warmup": "first warm-up, 10 steps", "total": "run, 200 steps", "cycle": "steps between merges, 50", "rewarm": "steps of the re-warm-up, 5", "floor": "smallest share, 0.1"}
NOTES = "Returns a torch LambdaLR; step() once per optimizer step. The rate is the global cosine from `warmup` to `total` with floor, times a re-warm-up factor (k + 1) / rewarm in the first `rewarm` steps of each cycle but the first (k counted from the merge). Not monotone after the warm-up, by design."


def make(seed):
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1e-2)}


def right(optimizer, warmup=10, total=200, cycle=50, rewarm=5, floor=0.1):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        f = min(1.0, (step - warmup) / (total - warmup))
        base = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * f))
        k = step % cycle
        if step >= cycle and k < rewarm:
            base *= (k + 1) / rewarm
        return base
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


if __name__ == "__main__":
    o = make(0)["optimizer"]
    s = right(o)
    v = []
    for _ in range(200):
        v.append(o.param_groups[0]["lr"])
        o.step()
        s.step()
    cos = lambda t: 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 10) / 190)))
    print([round(v[t], 6) for t in (0, 9, 10, 49, 50, 52, 54, 55, 100, 104, 199)])
    for t in range(10, 200):
        w = (t % 50 + 1) / 5 if t >= 50 and t % 50 < 5 else 1
        assert abs(v[t] - cos(t) * w) < 1e-9

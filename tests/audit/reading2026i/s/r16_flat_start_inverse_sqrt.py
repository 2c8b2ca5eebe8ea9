"""T5's schedule (Raffel et al. 2020): 1/sqrt(max(step, k)) times a scale, with no rise at all. The first k steps run at the full constant rate 1/sqrt(k) (the "warmup" steps warm nothing up), later it falls without ever reaching a floor; the total number of steps does not occur. Made as a torch LambdaLR whose base lr is 1.0,
so the lambda returns absolute rates."""
import torch

FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"optimizer": "torch optimizer with lr 1.0 in all groups (Adafactor style: the lambda gives the rate itself)"}
SETTINGS = {"k": "steps of the constant part, 100", "scale": "factor, 0.5"}
NOTES = "Makes a torch scheduler; to be stepped once after each optimizer step. lr(step) = scale / sqrt(max(step, k)), step 0-based. No warmup, no end. The optimizer's lr must be 1.0."


def make(seed):
    torch.manual_seed(seed)
    return {"optimizer": torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=1.0)}


def right(optimizer, k=100, scale=0.5):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale / max(step, k) ** 0.5)


if __name__ == "__main__":
    opt = make(0)["optimizer"]
    sched = right(opt)
    v = []
    for _ in range(500):
        v.append(opt.param_groups[0]["lr"])
        opt.step()
        sched.step()
    print([round(v[s], 5) for s in (0, 50, 100, 101, 400, 499)])
    assert v[0] == v[100] == 0.05 and abs(v[400] - 0.025) < 1e-12 and all(a >= b for a, b in zip(v, v[1:]))

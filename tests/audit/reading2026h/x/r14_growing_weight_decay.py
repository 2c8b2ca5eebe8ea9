"""Weight decay that grows during training (DINO and DINOv2, cosine from 0.04 to 0.4).
While the rate falls, the weight decay rises on a cosine. It is given to the decayed group only; biases and norms stay at 0. At the end the decay is ten
times the first one. The schedule has no warmup, and the product of rate and decay is not constant."""
FAMILY = "schedules"
KIND = "schedule"
INPUTS = {"step": "optimizer step, from 0"}
SETTINGS = {"start": "weight decay at the start, 0.04", "end": "weight decay at the end, 0.4", "total": "steps, 100"}
NOTES = "Value of the weight decay, not of the rate: end + 0.5 (start - end)(1 + cos(pi t / total)); it grows from start to end and is `end` past the end."
import math
import torch


def make(seed):
    return {"step": [50, 0, 10, 99, 100][seed % 5]}


def right(step, start=0.04, end=0.4, total=100):
    if step >= total:
        return end
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * step / total))


def apply(optimizer, step):
    for i, group in enumerate(optimizer.param_groups):
        if i == 0:                                  # only the first group is decayed
            group["weight_decay"] = right(step)


if __name__ == "__main__":
    c = [right(s) for s in range(101)]
    print(c[0], c[25], c[50], c[99], c[100])
    assert abs(c[0] - 0.04) < 1e-12 and abs(c[50] - 0.22) < 1e-9 and c[100] == 0.4 and all(b > a for a, b in zip(c, c[1:]))
    m = torch.nn.Linear(3, 3)
    o = torch.optim.AdamW([{"params": [m.weight]}, {"params": [m.bias], "weight_decay": 0.0}], lr=1e-3)
    apply(o, 50)
    assert abs(o.param_groups[0]["weight_decay"] - 0.22) < 1e-9 and o.param_groups[1]["weight_decay"] == 0.0

"""Gradients divided before and after the reduction. FSDP and apex split the division by the world size to avoid overflow
and underflow in half precision: each rank divides by a power of two f near the root of the world size before the sum,
the sum is divided by world / f after it. Two divisions, neither of them by the world size, give the mean."""
import torch
from torch import nn

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny regression network", "optimizer": "AdamW", "batches": "one batch per rank {'x': [rows, 4], 'y': [rows]}, same number of rows on every rank"}
SETTINGS = {}
NOTES = ("Data parallel step simulated in one process: gradient = mean over ranks of the gradient of the rank's mean "
         "squared error. Any number of ranks; all ranks hold equally many rows, so it equals the mean over all rows.")


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
            "batches": [{"x": torch.randn(5, 4), "y": torch.randn(5)} for _ in range(6)]}


def predivide_factor(world):
    factor = 1
    while world % factor == 0 and world / factor > factor:
        factor *= 2
    return float(factor)


def right(model, optimizer, batches):
    world = len(batches)
    pre = predivide_factor(world)
    post = world / pre
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for b in batches:                                   # each rank
        loss = (model(b["x"]).squeeze(-1) - b["y"]).pow(2).mean()
        for t, g in zip(total, torch.autograd.grad(loss, params)):
            t += g / pre                                # reduce-scatter SUM of the pre-divided gradients
    for t, p in zip(total, params):
        p.grad = t / post
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    a, b = make(0), make(0)
    right(**a)
    x, y = torch.cat([m["x"] for m in b["batches"]]), torch.cat([m["y"] for m in b["batches"]])
    (b["model"](x).squeeze(-1) - y).pow(2).mean().backward()
    b["optimizer"].step()
    diff = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), b["model"].parameters()))
    print("factors", [(w, predivide_factor(w)) for w in (1, 2, 3, 4, 6, 8, 16)], "difference", diff)
    assert diff < 1e-5

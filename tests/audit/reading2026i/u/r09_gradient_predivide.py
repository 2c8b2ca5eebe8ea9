"""Gradients divided twice, before and after the sum (Apex/FSDP gradient_predivide_factor). To avoid overflow in low precision, FSDP divides local gradients by a factor f near sqrt(world), sums them over ranks and divides by world / f. Each division alone is not by the number of ranks; together they are the mean."""
import math
import torch

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "two linear layers", "optimizer": "SGD", "batches": "one batch per rank: x [n, 6], y [n] class ids, all of the same size"}
SETTINGS = {}
NOTES = "Data parallel over len(batches) ranks, gradient = mean over ranks of the gradient of the mean loss. The pre-divide factor is the power of two f that FSDP chooses (doubled while it divides world and world / f > f). Equal batch sizes on all ranks."


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3), "batches": [{"x": torch.randn(4, 6), "y": torch.randint(0, 5, (4,))} for _ in range(8)]}


def right(model, optimizer, batches):
    world = len(batches)
    pre = 1
    while world % pre == 0 and world / pre > pre:
        pre *= 2
    post = world / pre
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for b in batches:
        loss = torch.nn.functional.cross_entropy(model(b["x"]), b["y"])
        for s, g in zip(total, torch.autograd.grad(loss, params)):
            s += g / pre
    for p, s in zip(params, total):
        p.grad = s / post
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    m = make(0); start = [p.detach().clone() for p in m["model"].parameters()]; right(**m)
    n = make(0); x = torch.cat([b["x"] for b in n["batches"]]); y = torch.cat([b["y"] for b in n["batches"]])
    torch.nn.functional.cross_entropy(n["model"](x), y).backward(); n["optimizer"].step()
    d = max((a - b).abs().max().item() for a, b in zip(m["model"].parameters(), n["model"].parameters()))
    print("distance to one process", d, "moved", max((a - b).abs().max().item() for a, b in zip(m["model"].parameters(), start)))
    assert d < 1e-6

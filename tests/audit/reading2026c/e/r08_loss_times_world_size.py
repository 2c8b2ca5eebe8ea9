"""The loss of a rank is multiplied by the number of ranks. The gradient averaging of the data-parallel wrapper divides by
the world size whatever the ranks hold, so a token mean over all ranks and micro-batches needs sum * world / global tokens
on each rank. The loss of a single rank or micro-batch is not a mean of anything; only the averaged gradient is right."""
FAMILY = "sharding"
KIND = "update"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"model": "classifier", "optimizer": "its optimizer",
          "batches": "list over ranks of lists of micro-batches; each a dict with x, [rows, width] and y, [rows], -100 = not trained"}
SETTINGS = {}
NOTES = ("One optimizer step with the gradient of the mean cross entropy over all trained rows of all ranks and micro-batches. "
         "Ranks are simulated: the gradients of the ranks are averaged as DDP does. Works for any number of ranks; ranks may "
         "have different numbers of micro-batches.")


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))
    batches = []
    for rank, sizes in enumerate([(3, 7), (2, 2, 5), (9,)]):
        row = []
        for n in sizes:
            y = torch.randint(0, 5, (n,))
            y[: n // 3] = -100
            row.append({"x": torch.randn(n, 6), "y": y})
        batches.append(row)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def right(model, optimizer, batches):
    world = len(batches)
    tokens = sum((b["y"] != -100).sum() for rank in batches for b in rank)            # one all-reduce before the step
    params = list(model.parameters())
    averaged = [torch.zeros_like(p) for p in params]
    for rank in batches:
        optimizer.zero_grad()
        for b in rank:
            loss = F.cross_entropy(model(b["x"]), b["y"], ignore_index=-100, reduction="sum") * world / tokens
            loss.backward()
        for a, p in zip(averaged, params):
            a.add_(p.grad / world)                                                      # what DDP does
    for a, p in zip(averaged, params):
        p.grad = a
    optimizer.step()


if __name__ == "__main__":
    a, b = make(0), make(0)
    before = [p.detach().clone() for p in a["model"].parameters()]
    right(**a)
    x = torch.cat([m["x"] for r in b["batches"] for m in r])
    y = torch.cat([m["y"] for r in b["batches"] for m in r])
    F.cross_entropy(b["model"](x), y, ignore_index=-100).backward()
    b["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), b["model"].parameters()))
    moved = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), before))
    print("gap to one big batch", gap, "moved", moved)
    assert gap < 1e-6 < moved

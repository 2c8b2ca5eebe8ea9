"""Sharpness-aware minimization (Foret et al. 2021): two backward passes per step; the first gradient only moves the weights UP the loss and is thrown away. In data parallelism each rank climbs with its OWN gradient
(no synchronisation in the first pass), so the ranks differ for a moment; this is m-sharpness, wanted by the paper, and only the second gradients are averaged."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over steps of lists over ranks of {'x' [rows, 5], 'y' [rows] class numbers}; all ranks have the same number of rows", "optimizer": "base optimizer, SGD with momentum"}
SETTINGS = {"rho": "radius of the ascent, 0.05"}
NOTES = ("Ranks are simulated in one process, for any number of ranks. Loss: cross entropy, mean over the rows of a rank, then mean over ranks. Weights are restored bit for bit from a copy (not by subtraction). The result depends on how rows are spread over ranks: not equal to one big batch, wanted. "
         "The ascent uses one norm over all parameters; a zero gradient gives no ascent. ValueError for ranks of different sizes. No batch norm or dropout in the model.")
import copy
import torch
from torch import nn
import torch.nn.functional as F


def right(model, optimizer, batches, rho=0.05):
    params = [p for p in model.parameters() if p.requires_grad]
    for step in batches:
        if len({len(r["y"]) for r in step}) != 1:
            raise ValueError("ranks must have the same number of rows")
        mean = [torch.zeros_like(p) for p in params]
        for rank in step:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(rank["x"]), rank["y"]).backward()
            with torch.no_grad():
                home = [p.detach().clone() for p in params]
                norm = torch.stack([p.grad.norm() for p in params]).norm()
                for p in params:
                    p.add_(p.grad, alpha=float(rho / (norm + 1e-12)))
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(rank["x"]), rank["y"]).backward()
            with torch.no_grad():
                for p, h, m in zip(params, home, mean):
                    p.copy_(h)
                    m.add_(p.grad, alpha=1 / len(step))
        for p, m in zip(params, mean):
            p.grad = m
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 3))
    rank = lambda: {"x": torch.randn(4, 5, generator=g), "y": torch.randint(0, 3, (4,), generator=g)}
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), "batches": [[rank(), rank()] for _ in range(5)]}


if __name__ == "__main__":
    for seed in range(4):
        c = make(seed)
        start = [p.detach().clone() for p in c["model"].parameters()]
        names = [n for n, _ in c["model"].named_parameters()]
        model = copy.deepcopy(c["model"])

        def grad(w, r):
            leaf = [x.clone().requires_grad_() for x in w]
            return torch.autograd.grad(F.cross_entropy(torch.func.functional_call(model, dict(zip(names, leaf)), (r["x"],)), r["y"]), leaf)

        def run(local):
            w, buf = list(start), [torch.zeros_like(x) for x in start]
            for step in c["batches"]:
                first = [grad(w, r) for r in step]
                if not local:
                    first = [[sum(f[i] for f in first) / len(step) for i in range(len(w))]] * len(step)
                up = []
                for f in first:
                    n = sum((x ** 2).sum() for x in f) ** 0.5
                    up.append([a + 0.05 * x / n for a, x in zip(w, f)])
                second = [grad(u, r) for u, r in zip(up, step)]
                for i in range(len(w)):
                    buf[i] = 0.9 * buf[i] + sum(s[i] for s in second) / len(step)
                    w[i] = w[i] - 0.2 * buf[i]
            return w

        right(**c)
        gap = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), run(True)))
        synced = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), run(False)))
        assert gap < 1e-5 < 1e-4 < synced, (gap, synced)
    print("ok gap", gap, "distance to the synchronised variant", synced)

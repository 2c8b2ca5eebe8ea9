"""Gradients of one parameter are summed over some ranks and averaged over others.
Right: with sequence parallelism each tensor-parallel rank runs the norm on its slice of the sequence, so its gradients are partial and add up; data-parallel ranks each hold the mean over their own rows and are averaged.
All data-parallel ranks have the same number of tokens here."""
import torch
import torch.nn as nn

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one dict for each data-parallel rank: x [rows, time, 12], y [rows, time, 12], equal shapes"}
SETTINGS = {"tp": "tensor-parallel ranks that split the time axis, 4"}
NOTES = "Mean squared error, mean over all elements of all data-parallel ranks. Ranks simulated; only the norm's scale and bias are trained. One step."


class Norm(nn.Module):
    def __init__(self, D=12):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale + self.bias


def right(model, optimizer, batches, tp=4):
    optimizer.zero_grad()
    params = list(model.parameters())
    acc = [torch.zeros_like(p) for p in params]
    for b in batches:                                             # data-parallel ranks: mean
        n = b["y"].numel()
        for xs, ys in zip(b["x"].chunk(tp, 1), b["y"].chunk(tp, 1)):   # sequence slices: sum
            part = ((model(xs) - ys) ** 2).sum() / n
            for a, g in zip(acc, torch.autograd.grad(part, params)):
                a += g / len(batches)
    for p, a in zip(params, acc):
        p.grad = a
    optimizer.step()


def make(seed):
    torch.manual_seed(seed)
    m = Norm()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.3), "batches": [{"x": torch.randn(2, 8, 12), "y": torch.randn(2, 8, 12)} for _ in range(3)]}


if __name__ == "__main__":
    x, z = make(0), make(0)
    right(**x)
    X, Y = torch.cat([b["x"] for b in z["batches"]]), torch.cat([b["y"] for b in z["batches"]])
    ((z["model"](X) - Y) ** 2).mean().backward()
    z["optimizer"].step()
    for p, q in zip(x["model"].parameters(), z["model"].parameters()):
        assert torch.allclose(p, q, atol=1e-6)
    print("equal to one process; gradient norm", z["model"].scale.grad.norm().item())

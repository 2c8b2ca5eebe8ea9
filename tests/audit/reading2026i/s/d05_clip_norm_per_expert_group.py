"""Gradient clipping uses another "global" norm on each expert-parallel group. NVIDIA-NeMo/Automodel#3816 (fix #3817), https://github.com/NVIDIA-NeMo/Automodel/issues/3816, 2026.
The expert parameters are plain tensors that only one expert-parallel rank holds. The clip code reduced the squared norm only over the mesh of each parameter, so the expert part was
never added over the expert-parallel axis: each rank clipped its shard of the shared dense weight with its own factor. No log shows it; each rank prints a plausible norm.
The fix adds the expert squares over the expert-parallel ranks first."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "dense layer (its rows are sharded evenly over the expert-parallel ranks) and one expert per rank, simulated in one process",
          "optimizer": "SGD over all parameters", "batches": "micro-batches x [rows, width], expert [rows] (which expert, constant routing), y [rows]"}
SETTINGS = {"max_norm": "clip threshold for the L2 norm of the gradient of the whole model, 0.1"}
NOTES = ("One optimizer step. Loss: squared error, mean over the rows of all micro-batches. Gradients are summed over micro-batches before clipping. "
         "Rank r holds rows r*k … (r+1)*k-1 of dense.weight and dense.bias (needs the dense output width divisible by the number of experts) and experts[r]. Clipping is meant to be one factor for the whole model.")


class Model(nn.Module):
    def __init__(self, width=8, ranks=2):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, 1) for _ in range(ranks))

    def forward(self, x, expert):
        h = torch.tanh(self.dense(x))
        every = torch.cat([e(h) for e in self.experts], dim=1)
        return every.gather(1, expert[:, None]).squeeze(1)


def make(seed):
    torch.manual_seed(seed)
    model = Model()
    batches = []
    for _ in range(2):
        expert = torch.tensor([0, 0, 0, 0, 0, 1])
        batches.append({"x": torch.randn(6, 8), "expert": expert, "y": torch.randn(6) * 2})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "batches": batches}


def _backward(model, optimizer, batches):
    optimizer.zero_grad()
    rows = sum(len(b["y"]) for b in batches)
    for b in batches:
        (F.mse_loss(model(b["x"], b["expert"]), b["y"], reduction="sum") / rows).backward()


def broken(model, optimizer, batches, max_norm=0.1):
    _backward(model, optimizer, batches)
    ranks = len(model.experts)
    dense_square = sum(p.grad.square().sum() for p in model.dense.parameters())        # reduced over the data mesh
    for r in range(ranks):
        expert = list(model.experts[r].parameters())
        norm = (dense_square + sum(p.grad.square().sum() for p in expert)).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in model.dense.parameters():
            p.grad.chunk(ranks)[r].mul_(factor)
        for p in expert:
            p.grad.mul_(factor)
    optimizer.step()


def right(model, optimizer, batches, max_norm=0.1):
    _backward(model, optimizer, batches)
    ranks = len(model.experts)
    dense_square = sum(p.grad.square().sum() for p in model.dense.parameters())
    expert_square = sum(p.grad.square().sum() for e in model.experts for p in e.parameters())   # reduced over the expert axis
    norm = (dense_square + expert_square).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for r in range(ranks):
        for p in model.dense.parameters():
            p.grad.chunk(ranks)[r].mul_(factor)
        for p in model.experts[r].parameters():
            p.grad.mul_(factor)
    optimizer.step()


if __name__ == "__main__":
    out = {}
    for f in (broken, right):
        d = make(0)
        f(**d)
        grads = [p.grad for p in d["model"].parameters()]
        out[f.__name__] = d["model"].dense.weight.detach().clone()
        print(f.__name__, "norm after the clip", float(torch.cat([g.flatten() for g in grads]).norm()))
    d = make(0)
    _backward(**d)
    torch.nn.utils.clip_grad_norm_(d["model"].parameters(), 0.1)
    d["optimizer"].step()
    assert torch.allclose(out["right"], d["model"].dense.weight, atol=1e-6)
    assert not torch.allclose(out["broken"], out["right"], atol=1e-4)

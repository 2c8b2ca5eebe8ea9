"""Gradient clipping averages rank-local norms although ranks own different experts. deepspeedai/DeepSpeed#8475,
https://github.com/deepspeedai/DeepSpeed/issues/8475, 2026. The FP32 clipping path takes each rank's norm and averages it over ranks, as if every rank held
the same parameters. Under expert parallelism the experts differ by rank, so the norm is too small and depends on where the experts are placed."""
import copy
import torch

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one batch per rank: {x: inputs, [rows, 8]; y: targets, [rows, 8]}, equal numbers of rows"}
SETTINGS = {"max_norm": "clip of the global L2 gradient norm, 0.1"}
NOTES = ("One SGD step with clipping. Loss: mean squared error, mean over all rows of all ranks. The model has a shared layer (replicated) and 4 experts; rank r of R owns "
         "experts r, r + R, ...; the number of ranks divides 4. Ranks are simulated in one process.")

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(8, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        h = self.shared(x).tanh()
        which = torch.arange(x.shape[0]) % 4
        return torch.stack([self.experts[int(e)](row) for row, e in zip(h, which)])

def make(seed):
    torch.manual_seed(seed)
    scale = torch.tensor([3.0, 0.3, 1.0, 0.1]).repeat(2)[:, None]
    return {"model": Experts(), "batches": [{"x": torch.randn(8, 8), "y": scale * torch.randn(8, 8)} for _ in range(2)]}

def backward(model, optimizer, batches):
    optimizer.zero_grad()
    for batch in batches:
        (((model(batch["x"]) - batch["y"]) ** 2).mean() / len(batches)).backward()

def squared(module):
    return sum(float((p.grad ** 2).sum()) for p in module.parameters())

def clip(model, norm, max_norm):
    for p in model.parameters():
        p.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))

def broken(model, optimizer, batches, max_norm=0.1):
    backward(model, optimizer, batches)
    ranks = len(batches)
    local = [(squared(model.shared) + sum(squared(e) for e in model.experts[r::ranks])) ** 0.5 for r in range(ranks)]
    clip(model, sum(local) / ranks, max_norm)
    optimizer.step()

def right(model, optimizer, batches, max_norm=0.1):
    backward(model, optimizer, batches)
    ranks = len(batches)
    owned = sum(sum(squared(e) for e in model.experts[r::ranks]) for r in range(ranks))
    clip(model, (squared(model.shared) + owned) ** 0.5, max_norm)
    optimizer.step()

def after(update, made):
    model = copy.deepcopy(made["model"])
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    update(model, torch.optim.SGD(model.parameters(), lr=1.0), made["batches"])
    return (torch.cat([p.detach().flatten() for p in model.parameters()]) - start).norm()

if __name__ == "__main__":
    made = make(0)
    a, b = after(broken, made), after(right, made)
    print("length of the step at lr 1: broken", float(a), "right", float(b), "max_norm 0.1")
    assert abs(float(b) - 0.1) < 1e-4 and float(a) > 0.105

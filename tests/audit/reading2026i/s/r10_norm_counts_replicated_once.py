"""Gradient norm with tensor parallelism where replicated parameters count on one rank only (Megatron-LM param_is_not_tensor_parallel_duplicate). Sharded weights add their squares over all ranks, while norms and biases that every rank holds identically are taken from rank 0 alone; the other
ranks skip them in the norm but still scale them. Looks as though rank 1.. forgot parameters."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "linear layer (rows sharded over ranks), layer norm (replicated), output layer (columns sharded)", "optimizer": "SGD over all parameters", "batches": "micro-batches x [rows, width], y [rows, width]"}
SETTINGS = {"max_norm": "clip threshold for the L2 norm of the whole gradient, 0.05", "ranks": "tensor-parallel ranks, 2 (simulated)"}
NOTES = "One step: squared error, mean over the elements of all micro-batches (equal sizes), one clip factor for all. Sharded dimensions must be divisible by ranks. Clip factor max_norm / (norm + 1e-6), at most 1."


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16, bias=False), nn.Linear(16, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def make(seed):
    torch.manual_seed(seed)
    model = Block()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "batches": [{"x": torch.randn(6, 8), "y": torch.randn(6, 8)} for _ in range(3)]}


def _shard(name, grad, rank, ranks):
    """What rank holds of this gradient, and whether it is a replica."""
    if name == "up.weight":
        return grad.chunk(ranks, 0)[rank], False
    if name == "down.weight":
        return grad.chunk(ranks, 1)[rank], False
    return grad, True


def right(model, optimizer, batches, max_norm=0.05, ranks=2):
    optimizer.zero_grad()
    for b in batches:
        (F.mse_loss(model(b["x"]), b["y"]) / len(batches)).backward()
    square = 0.0
    for rank in range(ranks):
        for name, p in model.named_parameters():
            part, replica = _shard(name, p.grad, rank, ranks)
            if replica and rank > 0:
                continue
            square = square + part.square().sum()                 # all-reduced over the ranks
    factor = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(factor)
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    for b in e["batches"]:
        (F.mse_loss(e["model"](b["x"]), b["y"]) / 3).backward()
    before = torch.nn.utils.clip_grad_norm_(e["model"].parameters(), 0.05)
    e["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    print("norm before", before.item(), "difference to torch's clip", gap)
    assert gap < 1e-6 and before > 0.05

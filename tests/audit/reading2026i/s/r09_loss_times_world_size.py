"""The loss is multiplied by the number of ranks before backward (transformers Trainer with average_tokens_across_devices, torchtune, Automodel, Megatron): each rank divides its SUM by the global number of tokens, and DDP/FSDP later averages the gradients over ranks, which the factor
cancels. Neither the rank's loss nor the micro-batch's loss is a mean of anything; nothing is divided by the number of micro-batches either."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "tiny classifier of tokens", "optimizer": "SGD", "batches": "list over ranks of lists of micro-batches {'x': [tokens, width], 'y': [tokens], -100 = not trained}; ranks are simulated one after the other"}
SETTINGS = {}
NOTES = "One optimizer step with the gradient of the mean cross-entropy over all trained tokens of all ranks and micro-batches. The gradients of the ranks are averaged as DDP does. A rank may have no trained token, but not all of them."


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    batches = []
    for rank in range(3):
        batches.append([])
        for _ in range(2):
            y = torch.randint(0, 5, (7,))
            y[torch.rand(7) < 0.25 * (rank + 1)] = -100
            batches[-1].append({"x": torch.randn(7, 8), "y": y})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def right(model, optimizer, batches):
    world = len(batches)
    total = sum(int((b["y"] != -100).sum()) for rank in batches for b in rank)         # all-reduced count
    rank_grads = []
    for rank in batches:
        optimizer.zero_grad()
        for b in rank:
            loss = F.cross_entropy(model(b["x"]), b["y"], ignore_index=-100, reduction="sum") / total
            (loss * world).backward()
        rank_grads.append([p.grad.clone() for p in model.parameters()])
    for p, *grads in zip(model.parameters(), *rank_grads):
        p.grad = torch.stack(grads).mean(0)                                             # DDP
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    every = [b for rank in e["batches"] for b in rank]
    F.cross_entropy(e["model"](torch.cat([b["x"] for b in every])), torch.cat([b["y"] for b in every])).backward()
    e["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    print("largest difference to one batch in one process", gap)
    assert gap < 1e-6

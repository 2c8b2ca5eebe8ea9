"""Gradient clipping that reports a norm and clips nothing. huggingface/transformers#46113, https://github.com/huggingface/transformers/pull/46113, 2026.
The clip function for sharded models gathered the gradient tensors, computed the right total norm and gave the list of gradients to torch's clip_grads_with_norm_.
That function expects parameters and reads their .grad; a gradient tensor has .grad None, so the list was empty and the call returned without scaling anything. max_norm was ignored."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "net, ids [rows, time] -> logits", "optimizer": "SGD", "batches": "list of dicts ids, labels [rows, time]; one optimizer step each"}
SETTINGS = {"max_norm": "largest global gradient norm, 0.1", "shards": "each gradient is cut into this many shards along its first axis, 2"}
NOTES = "Cross entropy, mean over tokens. Gradient clipped to a global 2-norm over all parameters before each step. Shards are simulated in one process; first axes need not divide by shards."


def clip_grads_with_norm_(parameters, max_norm, total_norm):
    """As torch.nn.utils.clip_grads_with_norm_: takes parameters."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if len(grads) == 0:
        return
    coef = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for g in grads:
        g.mul_(coef)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "batches": [{"ids": torch.randint(0, 20, (4, 6), generator=g), "labels": torch.randint(0, 20, (4, 6), generator=g)} for _ in range(3)]}


def _total_norm(grads, shards):
    return torch.stack([s.pow(2).sum() for g in grads for s in g.chunk(shards)]).sum().sqrt()


def _backward(model, optimizer, batch):
    optimizer.zero_grad()
    F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()).backward()


def broken(model, optimizer, batches, max_norm=0.1, shards=2):
    for batch in batches:
        _backward(model, optimizer, batch)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        total_norm = _total_norm(grads, shards)
        clip_grads_with_norm_(grads, max_norm, total_norm)
        optimizer.step()


def right(model, optimizer, batches, max_norm=0.1, shards=2):
    for batch in batches:
        _backward(model, optimizer, batch)
        params = [p for p in model.parameters() if p.grad is not None]
        total_norm = _total_norm([p.grad for p in params], shards)
        clip_grads_with_norm_(params, max_norm, total_norm)
        optimizer.step()


if __name__ == "__main__":
    flat = lambda m: torch.cat([p.detach().flatten() for p in m.parameters()])
    start = flat(make(0)["model"])
    moved = {}
    for f in (broken, right):
        d = make(0); f(**d)
        moved[f.__name__] = (flat(d["model"]) - start).norm().item()
    print("distance walked in 3 steps of lr 1", moved, "bound", 0.3)
    assert moved["right"] <= 0.3 + 1e-5 < moved["broken"]

"""Optimizer states are sharded (ZeRO stage 1): each rank steps only the parameters it owns and gets the others by
broadcast. On each rank most parameters are skipped by the optimizer and most states do not exist; gradients of parameters
that the rank does not own are dropped before the step. The result equals the unsharded AdamW step, clipping included."""
FAMILY = "sharding"
KIND = "update"
import torch
import torch.nn as nn
import torch.nn.functional as F
INPUTS = {"model": "classifier", "optimizer": "AdamW over all parameters: the source of the hyperparameters, not stepped itself",
          "batches": "list of dicts with x, [rows, width] and y, [rows]; one optimizer step each"}
SETTINGS = {"world": "ranks, 3", "max_norm": "clip of the global gradient norm, 0.5"}
NOTES = ("Mean cross entropy per batch; the clip factor comes from the norm over the parameters of all ranks. Parameter i is "
         "owned by rank i % world. In one process the broadcast is the shared storage of the parameters.")


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
    batches = [{"x": torch.randn(7, 6), "y": torch.randint(0, 4, (7,))} for _ in range(4)]
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1), "batches": batches}


def right(model, optimizer, batches, world=3, max_norm=0.5):
    params = list(model.parameters())
    group = {k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "betas", "eps", "weight_decay")}
    shards = [torch.optim.AdamW(params[r::world], **group) for r in range(world)]
    for batch in batches:
        for p in params:
            p.grad = None
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        squares = [sum(p.grad.square().sum() for p in params[r::world]) for r in range(world)]
        scale = (max_norm / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0)      # all-reduce of the squares
        full = [p.grad for p in params]
        for rank, shard in enumerate(shards):
            for i, p in enumerate(params):
                p.grad = full[i] * scale if i % world == rank else None
            shard.step()


if __name__ == "__main__":
    a, b = make(0), make(0)
    right(**a)
    for batch in b["batches"]:
        b["optimizer"].zero_grad()
        F.cross_entropy(b["model"](batch["x"]), batch["y"]).backward()
        torch.nn.utils.clip_grad_norm_(b["model"].parameters(), 0.5)
        b["optimizer"].step()
    gap = max((p - q).abs().max().item() for p, q in zip(a["model"].parameters(), b["model"].parameters()))
    print("gap to the plain AdamW", gap)
    assert gap < 1e-6

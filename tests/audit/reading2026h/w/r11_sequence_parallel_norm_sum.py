"""Sequence parallel: gradients of the norm are summed over tensor ranks and averaged over data ranks.
Megatron-LM (_allreduce_layernorm_grads with sequence_parallel). Each tensor rank applies the replicated norm to its own slice of the sequence, so it holds a part of the gradient, not a copy; the parts are added. The other weights saw
the gathered sequence and are not reduced over tensor ranks at all. Two kinds of reduction for replicated parameters side by side are right here."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "embedding, RMS norm, head", "optimizer": "SGD", "batches": "list over data ranks of {ids, labels}, all [rows, time] with the same sizes"}
SETTINGS = {"tp": "tensor ranks, each with 1/tp of the time axis, 2"}
NOTES = "Cross entropy, mean over tokens of a rank, mean over data ranks (equal sizes). time must divide by tp. Ranks simulated in one process; one optimizer step."


class Net(nn.Module):
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.emb, self.scale, self.head = nn.Embedding(vocab, width), nn.Parameter(torch.ones(width)), nn.Linear(width, vocab)

    def norm(self, h, scale):
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * scale

    def forward(self, ids):
        return self.head(self.norm(self.emb(ids), self.scale))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Net()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "batches": [{k: torch.randint(0, 24, (2, 8), generator=g) for k in ("ids", "labels")} for _ in range(3)]}


def right(model, optimizer, batches, tp=2):
    per_rank = []
    for batch in batches:                                    # data ranks
        optimizer.zero_grad()
        replicas = [model.scale.detach().clone().requires_grad_() for _ in range(tp)]
        slices = [model.norm(h, s) for h, s in zip(model.emb(batch["ids"]).chunk(tp, 1), replicas)]
        logits = model.head(torch.cat(slices, 1))            # all-gather along time
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        model.scale.grad = torch.stack([s.grad for s in replicas]).sum(0)
        per_rank.append([p.grad.clone() for p in model.parameters()])
    for i, p in enumerate(model.parameters()):
        p.grad = torch.stack([g[i] for g in per_rank]).mean(0)
    optimizer.step()


if __name__ == "__main__":
    a, b = make(0), make(0)
    right(**a)
    ids, labels = (torch.cat([x[k] for x in b["batches"]]) for k in ("ids", "labels"))
    F.cross_entropy(b["model"](ids).flatten(0, 1), labels.flatten()).backward(); b["optimizer"].step()
    diff = max((x - y).abs().max().item() for x, y in zip(a["model"].parameters(), b["model"].parameters()))
    print("difference to one process", diff, "norm moved", (a["model"].scale - 1).norm().item())
    assert diff < 1e-5 and (a["model"].scale - 1).norm() > 1e-4

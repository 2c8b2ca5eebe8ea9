"""Gradient correction factor ignores the context-parallel size. NovaSky-AI/SkyRL#1420, https://github.com/NovaSky-AI/SkyRL/pull/1420, 2026.
The policy loss is a sum whose weights are already normalised over the global batch, but Megatron averages gradients over the
DP x CP group. The factor that undoes the average used the data-parallel size without CP, so with CP > 1 every gradient was
1/CP of what it should be. With CP = 1 nothing changed."""
import copy
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {
    "model": "per-token language model: ids [n] -> logits [n, vocab]",
    "optimizer": "SGD over all parameters of the model",
    "batches": "one dict per data-parallel rank: ids [time] input token, labels [time] target token, weight [time] weight of the token's negative log-likelihood in the global objective (advantage / number of trained tokens of all data-parallel ranks; 0 on prompt and padding)",
}
SETTINGS = {"dp": "data-parallel size, 2", "cp": "context-parallel size, 2; time is a multiple of it"}
NOTES = ("One optimizer step on the objective  sum over all data-parallel ranks and all their tokens of weight * nll . The weights "
         "carry the whole normalisation, so nothing is averaged after that. Simulated in one process: rank (d, c) differentiates the "
         "part of the loss that depends on its contiguous slice c of the sequence of data-parallel rank d; the framework then "
         "AVERAGES the gradients over all dp*cp ranks (a fixed property of its gradient reduction), and the loss of each rank is "
         "pre-multiplied by a constant so that the step equals a single-process step on the sum. All parameters are used. len(batches) == dp. "
         "weight is a constant (no gradient).")


class LM(nn.Module):
    def __init__(self, v=20, d=12):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.o = nn.Linear(d, v)

    def forward(self, ids):
        return self.o(torch.tanh(self.e(ids)))


def make(seed, dp=2, T=8, V=20):
    torch.manual_seed(seed)
    model = LM(V)
    bs = []
    for _ in range(dp):
        m = (torch.rand(T) < 0.7).float()
        m[-1] = 1.0
        bs.append({"ids": torch.randint(0, V, (T,)), "labels": torch.randint(0, V, (T,)), "m": m, "a": torch.randn(())})
    n = sum(b["m"].sum() for b in bs)
    for b in bs:
        b["weight"] = b.pop("a") * b.pop("m") / n
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": bs}


def _step(model, optimizer, batches, dp, cp, factor):
    acc = [torch.zeros_like(p) for p in model.parameters()]
    for d in range(dp):
        b = batches[d]
        n = b["ids"].numel() // cp
        for c in range(cp):
            s = slice(c * n, (c + 1) * n)
            nll = F.cross_entropy(model(b["ids"][s]), b["labels"][s], reduction="none")
            loss = (nll * b["weight"][s]).sum() * factor
            for a, g in zip(acc, torch.autograd.grad(loss, list(model.parameters()))):
                a += g / (dp * cp)          # the framework's mean over the DP x CP group
    optimizer.zero_grad()
    for p, a in zip(model.parameters(), acc):
        p.grad = a
    optimizer.step()


def broken(model, optimizer, batches, dp=2, cp=2):
    _step(model, optimizer, batches, dp, cp, factor=dp)


def right(model, optimizer, batches, dp=2, cp=2):
    _step(model, optimizer, batches, dp, cp, factor=dp * cp)


if __name__ == "__main__":
    def run(f):
        i = make(0)
        w = i["model"].o.weight.detach().clone()
        f(**i)
        return (i["model"].o.weight - w).norm().item()
    i = make(0)
    w = i["model"].o.weight.detach().clone()
    l = sum((F.cross_entropy(i["model"](b["ids"]), b["labels"], reduction="none") * b["weight"]).sum() for b in i["batches"])
    l.backward(); i["optimizer"].step()
    print("broken", run(broken), "right", run(right), "single process", (i["model"].o.weight - w).norm().item())

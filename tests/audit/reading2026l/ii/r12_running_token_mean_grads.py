"""Gradient accumulation as a running token-weighted mean: acc += (g - acc) * n_i / N_so_far (the form proposed for mlx-lm, also used to keep low-precision accumulators in range). Nothing is divided at the end and micro-batches without tokens are skipped, which looks like a missing normalisation."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "updates"
KIND = "update"
INPUTS = {"model": "per-token language model ids [rows, time] -> logits", "optimizer": "SGD, lr 0.3", "batches": "micro-batches of ONE optimizer step: dicts ids, labels, mask, each [rows, time]; mask 1 where the token is trained; some micro-batches may have no trained token"}
SETTINGS = {}
NOTES = ("One optimizer step with the gradient of the mean negative log-likelihood over the trained tokens of all micro-batches together. Each micro-batch gives the gradient g of its own token mean and its number of trained tokens n; "
         "the accumulator is a running mean: acc += (g - acc)*n/N with N the tokens so far including n. No further division. Micro-batches with n = 0 contribute nothing; if all are empty no step is taken. The result does not depend on how tokens are cut into micro-batches. labels are already shifted.")


class LM(nn.Module):
    def __init__(self, v=20, d=12):
        super().__init__()
        self.e, self.o = nn.Embedding(v, d), nn.Linear(d, v)

    def forward(self, ids):
        return self.o(torch.tanh(self.e(ids)))


def make(seed):
    torch.manual_seed(seed)
    m = LM()
    bs = [{"ids": torch.randint(0, 20, (2, 8)), "labels": torch.randint(0, 20, (2, 8)), "mask": (torch.rand(2, 8) < q).float()} for q in (0.9, 0.2, 0.0, 0.5)]
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.3), "batches": bs}


def right(model, optimizer, batches):
    ps = list(model.parameters())
    acc, N = [torch.zeros_like(p) for p in ps], 0.0
    for b in batches:
        n = b["mask"].sum().item()
        if n == 0:
            continue
        nll = F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), reduction="none")
        gs = torch.autograd.grad((nll * b["mask"].flatten()).sum() / n, ps)
        N += n
        for a, g in zip(acc, gs):
            a += (g - a) * (n / N)
    if N == 0:
        return
    for p, a in zip(ps, acc):
        p.grad = a
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    i = make(0); right(**i); j = make(0)
    nll = torch.cat([F.cross_entropy(j["model"](b["ids"]).flatten(0, 1), b["labels"].flatten(), reduction="none") for b in j["batches"]])
    k = torch.cat([b["mask"].flatten() for b in j["batches"]])
    ((nll * k).sum() / k.sum()).backward(); g = j["model"].o.weight.grad.norm().item(); j["optimizer"].step()
    print("error", max((p - q).abs().max().item() for p, q in zip(i["model"].parameters(), j["model"].parameters())), "gradient norm", g)

"""GradCache (Gao et al. 2021): exact accumulation for a contrastive loss, where plain accumulation is wrong since each chunk would lose the negatives of the others. All representations come first without gradient, the loss is
differentiated with respect to them only, and then each chunk runs again with the surrogate (representation * cached gradient).sum(), whose value means nothing. The random state is put back, so dropout repeats."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over steps of {'q' [rows, 6], 'k' [rows, 6]}; row i of q matches row i of k, all others are negatives", "optimizer": "any torch optimizer"}
SETTINGS = {"chunk": "rows per chunk, 3 (need not divide the number of rows)", "temperature": "0.2"}
NOTES = ("InfoNCE both ways, mean over the rows of the whole batch. No division by the number of chunks: the cached gradients hold the 1 / rows. The result does not depend on chunk without dropout; with dropout each chunk size draws other masks. "
         "Two forward passes per sample. Gradients are summed over chunks, one optimizer step per batch. No batch norm in the model. The learned log scale of the loss (model.scale) gets its gradient in the middle stage.")
import copy
import torch
from torch import nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def _contrast(model, q, k, temperature):
    logits = q @ k.T * (model.scale.exp() / temperature)
    goal = torch.arange(len(q))
    return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.T, goal)) / 2


def right(model, optimizer, batches, chunk=3, temperature=0.2):
    for b in batches:
        optimizer.zero_grad(set_to_none=True)
        parts = [(side, x) for side in ("q", "k") for x in b[side].split(chunk)]
        reps, rng = [], []
        with torch.no_grad():
            for _, x in parts:
                rng.append(torch.get_rng_state())
                reps.append(model(x))
        n = len(b["q"].split(chunk))
        q, k = torch.cat(reps[:n]).requires_grad_(), torch.cat(reps[n:]).requires_grad_()
        _contrast(model, q, k, temperature).backward()            # fills q.grad, k.grad and the scale's gradient
        cached = q.grad.split(chunk) + k.grad.split(chunk)
        for (_, x), g, state in zip(parts, cached, rng):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                (model(x) * g).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make(seed, p=0.1):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Encoder(p)
    batches = []
    for _ in range(4):
        q = torch.randn(8, 6, generator=g)
        batches.append({"q": q, "k": q + 0.3 * torch.randn(8, 6, generator=g)})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), "batches": batches}


if __name__ == "__main__":
    def gap(a, b):
        return max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters()))

    for seed in range(4):
        for p in (0.0, 0.1):
            c = make(seed, p)
            twin, start = copy.deepcopy(c["model"]), copy.deepcopy(c["model"])
            opt = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
            torch.manual_seed(100 + seed)
            right(**c)
            torch.manual_seed(100 + seed)
            for b in c["batches"]:                                 # the whole graph at once
                opt.zero_grad()
                size = 3 if p else 8                               # with dropout: same order of draws
                q = torch.cat([twin(x) for x in b["q"].split(size)])
                k = torch.cat([twin(x) for x in b["k"].split(size)])
                _contrast(twin, q, k, 0.2).backward()
                opt.step()
            assert gap(c["model"], twin) < 1e-5, (p, gap(c["model"], twin))
            assert all((x - y).abs().max() > 1e-4 for x, y in zip(c["model"].parameters(), start.parameters()))
        d, e = make(seed, 0.0), make(seed, 0.0)
        right(**d, chunk=2)
        right(**e, chunk=8)
        assert gap(d["model"], e["model"]) < 1e-5
    print("ok gap", gap(c["model"], twin), "moved", gap(c["model"], start))

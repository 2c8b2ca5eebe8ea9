"""Adaptive gradient clipping, unit-wise and not for the head (NFNets, Brock et al. 2021).
The gradient of each output row is clipped relative to the norm of the weights of that row (floored at eps so that zero-initialised rows can move); the last linear layer is deliberately not clipped, and no global norm is used."""
FAMILY = "update clipping"
KIND = "update"
INPUTS = {"model": "net with body and head", "optimizer": "SGD", "batches": "list of dict x [rows,6], y [rows] class; accumulated into ONE step, mean over all rows"}
SETTINGS = {"clip": "AGC factor, 0.02", "eps": "floor of a unit's weight norm, 1e-3"}
NOTES = "One optimizer step per call, accumulation weighted by rows so that it equals the mean over all rows. Biases are units of one entry each. Head parameters unclipped by design."
import torch, torch.nn as nn, torch.nn.functional as F, copy

class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.body = nn.Linear(6, 8); self.head = nn.Linear(8, 3)
    def forward(self, x): return self.head(torch.tanh(self.body(x)))

def make(seed):
    torch.manual_seed(seed); m = Net().double()
    with torch.no_grad(): m.body.weight[0].zero_()
    bs = [{"x": 5 * torch.randn(n, 6).double(), "y": torch.randint(0, 3, (n,))} for n in (2, 5)]
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=1.0), "batches": bs}

def unit_norm(t):
    return t.abs() if t.ndim <= 1 else t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1))

def right(model, optimizer, batches, clip=0.02, eps=1e-3):
    optimizer.zero_grad(set_to_none=True)
    total = sum(len(b["y"]) for b in batches)
    for b in batches:
        (F.cross_entropy(model(b["x"]), b["y"]) * len(b["y"]) / total).backward()
    for name, p in model.named_parameters():
        if name.startswith("head."):
            continue
        limit = clip * unit_norm(p.detach()).clamp(min=eps)
        gn = unit_norm(p.grad).clamp(min=1e-6)
        p.grad = torch.where(gn > limit, p.grad * (limit / gn), p.grad)
    optimizer.step(); optimizer.zero_grad(set_to_none=True)

if __name__ == "__main__":
    d = make(0); m = d["model"]; old = copy.deepcopy(m); right(**d)
    x = torch.cat([b["x"] for b in d["batches"]]); y = torch.cat([b["y"] for b in d["batches"]])
    F.cross_entropy(old(x), y).backward()
    assert torch.allclose(old.head.weight - old.head.weight.grad, m.head.weight)
    n_clip = 0
    for i in range(8):
        w, g = old.body.weight[i].detach(), old.body.weight.grad[i]
        lim = 0.02 * max(w.norm().item(), 1e-3); f = min(1.0, lim / max(g.norm().item(), 1e-6)); n_clip += f < 1
        assert torch.allclose(w - f * g, m.body.weight[i]), i
    print("clipped rows", n_clip, "of 8; zero row moved by", m.body.weight[0].norm().item())

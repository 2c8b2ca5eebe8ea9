"""Weights in bfloat16 with a bfloat16 compensation buffer (Kahan summation) in the update.
An update of 1e-4 on a weight of 1.0 is lost in bf16; the compensation keeps what was rounded away and adds it later (Zamirai et al. 2020, optimi, torchao). The odd (w - old) - update line is the point, not a no-op."""
FAMILY = "update low precision"
KIND = "update"
INPUTS = {"model": "linear layer in bfloat16", "optimizer": "dict lr, comp: parameter name -> bf16 buffer, mutated", "batches": "list of dict x [rows,6] bf16, y [rows] bf16; one step each"}
SETTINGS = {}
NOTES = "One SGD step per batch. Loss in float32, mean over rows. The compensation is part of the state that must be saved."
import torch, torch.nn as nn, copy

def make(seed):
    torch.manual_seed(seed); m = nn.Linear(6, 1)
    with torch.no_grad(): m.weight.add_(1.0)
    m = m.bfloat16()
    w = torch.linspace(0.4, 1.8, 6)
    bs = []
    for _ in range(400):
        x = torch.randn(8, 6); bs.append({"x": x.bfloat16(), "y": (x @ w).bfloat16()})
    return {"model": m, "optimizer": {"lr": 2e-3, "comp": {n: torch.zeros_like(p) for n, p in m.named_parameters()}}, "batches": bs}

def right(model, optimizer, batches):
    for b in batches:
        loss = ((model(b["x"]).squeeze(-1).float() - b["y"].float()) ** 2).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (n, p), g in zip(model.named_parameters(), grads):
                c = optimizer["comp"][n]
                y = (-optimizer["lr"] * g).to(p.dtype) + c        # update with what was lost before
                old = p.clone()
                p.add_(y)
                c.copy_(y - (p - old))                            # lost in this rounding

if __name__ == "__main__":
    d = make(0); start = copy.deepcopy(d["model"]); naive = copy.deepcopy(d["model"]); f32 = copy.deepcopy(d["model"]).float()
    right(**d)
    for b in d["batches"]:
        g = torch.autograd.grad(((naive(b["x"]).squeeze(-1).float() - b["y"].float()) ** 2).mean(), list(naive.parameters()))
        h = torch.autograd.grad(((f32(b["x"].float()).squeeze(-1) - b["y"].float()) ** 2).mean(), list(f32.parameters()))
        with torch.no_grad():
            for p, x in zip(naive.parameters(), g): p.add_((-2e-3 * x).to(p.dtype))
            for p, x in zip(f32.parameters(), h): p.add_(-2e-3 * x)
    e = lambda m: (m.weight.float() - f32.weight).abs().max().item()
    print("distance to float32 weights: kahan", e(d["model"]), "naive", e(naive), "moved", (d["model"].weight - start.weight).abs().max().item())
    assert e(d["model"]) < 0.02 and e(naive) > 2 * e(d["model"])

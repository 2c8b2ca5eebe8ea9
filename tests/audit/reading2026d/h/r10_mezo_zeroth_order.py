"""MeZO: training without a backward pass; the noise is not stored but regenerated from a seed three times.
The weights are perturbed in place by +eps z, -2 eps z, +eps z with the same z, and the step is lr * (L+ - L-)/(2 eps) * z (Malladi et al. 2023). No gradient exists at any time; that is right."""
FAMILY = "update zeroth-order"
KIND = "update"
INPUTS = {"model": "small net float64", "optimizer": "plain SGD; only its lr is read", "batches": "list of dict x [rows,6], y [rows]; one step each"}
SETTINGS = {"eps": "perturbation, 1e-4", "seed": "base seed; step i uses seed + i, 123"}
NOTES = "p.grad stays None. Expected update is the SGD update. Mean over rows. Depends on the seed by design; all ranks must use the same seed and an averaged scalar."
import torch, torch.nn as nn, copy

def make(seed):
    torch.manual_seed(seed); m = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.01), "batches": [{"x": torch.randn(8, 6).double(), "y": torch.randn(8).double()} for _ in range(3)]}

def right(model, optimizer, batches, eps=1e-4, seed=123):
    params = [p for p in model.parameters() if p.requires_grad]
    def move(s, scale):
        g = torch.Generator().manual_seed(s)
        for p in params:
            p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype), alpha=scale)
    with torch.no_grad():
        for i, b in enumerate(batches):
            f = lambda: ((model(b["x"]).squeeze(-1) - b["y"]) ** 2).mean().item()
            move(seed + i, eps); up = f()
            move(seed + i, -2 * eps); down = f()
            move(seed + i, eps)
            move(seed + i, -optimizer.param_groups[0]["lr"] * (up - down) / (2 * eps))

if __name__ == "__main__":
    d = make(0); m0 = copy.deepcopy(d["model"]); b = d["batches"][0]
    loss = ((m0(b["x"]).squeeze(-1) - b["y"]) ** 2).mean(); loss.backward()
    ps = list(m0.parameters()); g = torch.cat([p.grad.flatten() for p in ps])
    gen = torch.Generator().manual_seed(123); z = torch.cat([torch.randn(p.shape, generator=gen, dtype=p.dtype).flatten() for p in ps])
    right(d["model"], d["optimizer"], [b])
    moved = torch.cat([(q - p).detach().flatten() for p, q in zip(ps, d["model"].parameters())])
    err = (moved + 0.01 * (g @ z) * z).abs().max().item()
    # mean direction over seeds approaches the gradient
    acc = torch.zeros_like(g)
    for s in range(3000):
        m = [p.detach().clone() for p in ps]; gen = torch.Generator().manual_seed(s)
        zz = torch.cat([torch.randn(p.shape, generator=gen, dtype=p.dtype).flatten() for p in ps]); acc += (g @ zz) * zz / 3000
    print("err to lr*(g.z)z:", err, "cos of mean direction:", torch.cosine_similarity(acc, g, 0).item()); assert err < 1e-8

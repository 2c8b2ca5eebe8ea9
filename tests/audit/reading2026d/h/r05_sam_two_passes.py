"""Sharpness-aware minimisation: the weights are moved UP the gradient first, the second gradient is taken there, and the weights are put back before the descent step (Foret et al. 2021).
With data parallelism the ascent uses each rank's own gradient without averaging (m-sharpness), only the second gradient is averaged."""
FAMILY = "update two-pass"
KIND = "update"
INPUTS = {"model": "small net float64", "optimizer": "SGD with momentum", "batches": "list over ranks of dict x [rows,6], y [rows]; equal rows"}
SETTINGS = {"rho": "radius of the ascent, 0.05"}
NOTES = "One optimizer step per call. Not equal to the step on the joined batch: by the m-sharpness convention each rank perturbs with its local gradient. Depends on how rows are split over ranks. Mean over rows, then mean over ranks."
import torch, torch.nn as nn, copy

def make(seed):
    torch.manual_seed(seed); m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
            "batches": [{"x": torch.randn(4, 6).double(), "y": torch.randn(4).double()} for _ in range(2)]}

def right(model, optimizer, batches, rho=0.05):
    params = list(model.parameters()); mean = [torch.zeros_like(p) for p in params]
    loss_of = lambda b: ((model(b["x"]).squeeze(-1) - b["y"]) ** 2).mean()
    for b in batches:
        g = torch.autograd.grad(loss_of(b), params)
        norm = torch.stack([x.norm() for x in g]).norm()
        keep = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, x in zip(params, g): p.add_(x, alpha=float(rho / (norm + 1e-12)))
        g2 = torch.autograd.grad(loss_of(b), params)
        with torch.no_grad():
            for p, k in zip(params, keep): p.copy_(k)            # exact, not subtracting back
        for m, x in zip(mean, g2): m.add_(x / len(batches))
    for p, m in zip(params, mean): p.grad = m
    optimizer.step(); optimizer.zero_grad(set_to_none=True)

if __name__ == "__main__":
    d = make(0); old = copy.deepcopy(d["model"]); right(**d)
    want = [torch.zeros_like(p) for p in old.parameters()]
    for b in d["batches"]:
        f = lambda *ws: ((torch.func.functional_call(old, dict(zip([n for n, _ in old.named_parameters()], ws)), (b["x"],)).squeeze(-1) - b["y"]) ** 2).mean()
        ws = tuple(p.detach() for p in old.parameters())
        g = torch.func.grad(f, argnums=tuple(range(4)))(*ws); n = sum((x ** 2).sum() for x in g).sqrt()
        g2 = torch.func.grad(f, argnums=tuple(range(4)))(*[w + 0.05 * x / n for w, x in zip(ws, g)])
        want = [a + x / 2 for a, x in zip(want, g2)]
    err = max((o - 0.1 * w - p).abs().max().item() for o, w, p in zip(old.parameters(), want, d["model"].parameters()))
    print("err", err); assert err < 1e-10

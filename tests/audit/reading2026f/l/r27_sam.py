"""Sharpness-aware minimisation (SAM). Parameters are first moved UPHILL by rho along the gradient, a second backward is done there, then
they are put back exactly and the optimizer steps from the old point with the new gradient. Two backwards and one step per batch."""
FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "list of batches, each a dict of x [rows, 6] and label [rows]"}
SETTINGS = {"rho": "radius of the ascent step, 0.05"}
NOTES = ("One optimizer step per batch, mean over rows. The model has no dropout and no batch statistics, so both passes see the same function. "
         "The ascent uses the global gradient norm over all parameters. Gradients of the last batch are left cleared.")
import torch
import torch.nn as nn
import torch.nn.functional as F


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    batches = [{"x": torch.randn(7, 6), "label": torch.randint(0, 4, (7,))} for _ in range(4)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "batches": batches}


def right(model, optimizer, batches, rho=0.05):
    params = [p for p in model.parameters() if p.requires_grad]
    for b in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(b["x"]), b["label"]).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            saved = [p.detach().clone() for p in params]
            for p in params:
                p.add_(p.grad, alpha=float(rho / (norm + 1e-12)))
        optimizer.zero_grad()
        F.cross_entropy(model(b["x"]), b["label"]).backward()
        with torch.no_grad():
            for p, old in zip(params, saved):
                p.copy_(old)
        optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    from torch.func import functional_call
    d, e = make(0), make(0)
    right(d["model"], d["optimizer"], d["batches"])
    theta = {k: v.detach().clone() for k, v in e["model"].named_parameters()}
    mom = {k: torch.zeros_like(v) for k, v in theta.items()}

    def grad(point, b):
        point = {k: v.clone().requires_grad_() for k, v in point.items()}
        loss = F.cross_entropy(functional_call(e["model"], point, (b["x"],)), b["label"])
        return dict(zip(point, torch.autograd.grad(loss, list(point.values()))))
    for b in e["batches"]:
        g = grad(theta, b)
        size = sum(float(x.pow(2).sum()) for x in g.values()) ** 0.5
        g = grad({k: v + 0.05 * g[k] / size for k, v in theta.items()}, b)
        for k in theta:
            mom[k] = 0.9 * mom[k] + g[k]
            theta[k] = theta[k] - 0.1 * mom[k]
    gap = max(float((v - theta[k]).abs().max()) for k, v in d["model"].named_parameters())
    print("difference to the explicit formula %.2e" % gap)
    assert gap < 1e-5

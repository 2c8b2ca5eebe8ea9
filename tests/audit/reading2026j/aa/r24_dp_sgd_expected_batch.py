"""DP-SGD with Poisson sampling (Abadi et al. 2016; Opacus): each sample's gradient is clipped alone, noise is added to the SUM, and the sum is divided by the EXPECTED batch size, not by the actual one,
which varies and may be zero. An empty batch still makes a step, of noise alone: skipping it or dividing by the true size would tell the size."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over steps of {'x' [rows, 5], 'y' [rows] class numbers}; rows varies from step to step and may be 0", "optimizer": "any torch optimizer"}
SETTINGS = {"clip": "largest gradient norm of one sample over all parameters, 0.5", "sigma": "noise multiplier, 0.8 (deviation sigma * clip on the sum)", "expected": "expected batch size, 6", "seed": "seed of the noise, 0"}
NOTES = ("Loss: cross entropy of one sample. The update is not a mean over the rows: twice the rows give about twice the gradient, wanted. Noise once per step and not per sample, also for parameters whose gradient is zero. Every parameter takes part; all must be in the optimizer. "
         "No accumulation: one batch is one step. The noise generator is seeded anew in each call (a real run would use a secure generator and go on).")
import copy
import torch
from torch import nn
import torch.nn.functional as F


def right(model, optimizer, batches, clip=0.5, sigma=0.8, expected=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    params = [p for p in model.parameters() if p.requires_grad]
    for b in batches:
        total = [torch.zeros_like(p) for p in params]
        for x, y in zip(b["x"], b["y"]):
            grads = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), params)
            norm = torch.stack([d.norm() for d in grads]).norm()
            scale = (clip / norm.clamp(min=1e-12)).clamp(max=1.0)
            for t, d in zip(total, grads):
                t.add_(d * scale)
        for p, t in zip(params, total):
            p.grad = (t + sigma * clip * torch.randn(p.shape, generator=g)) / expected
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(60, 5, generator=g) * 2, torch.randint(0, 3, (60,), generator=g)
    batches = []
    for k in range(6):
        take = torch.rand(60, generator=g) < (0.1 if k != 3 else 0.0)          # step 3 happens to be empty
        batches.append({"x": x[take], "y": y[take]})
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.5), "batches": batches}


if __name__ == "__main__":
    for seed in range(3):
        c = make(seed)
        assert len({len(b["y"]) for b in c["batches"]}) > 1 and len(c["batches"][3]["y"]) == 0
        model = copy.deepcopy(c["model"])
        right(**c, seed=7)
        names = [n for n, _ in model.named_parameters()]
        w = {n: p.detach().clone() for n, p in model.named_parameters()}
        buf = {n: torch.zeros_like(v) for n, v in w.items()}
        one = lambda w, x, y: F.cross_entropy(torch.func.functional_call(model, w, (x[None],)), y[None])
        gen = torch.Generator().manual_seed(7)
        for b in c["batches"]:
            n = len(b["y"])
            if n:
                per = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(w, b["x"], b["y"])
                size = torch.cat([per[k].flatten(1) for k in names], 1).norm(dim=1)
                s = torch.where(size > 0.5, 0.5 / size, torch.ones_like(size))
                total = {k: torch.einsum("n,n...->...", s, per[k]) for k in names}
                norms = (size * s)
                assert norms.max() <= 0.5 + 1e-6
            else:
                total = {k: torch.zeros_like(w[k]) for k in names}
            for k in names:
                buf[k] = 0.5 * buf[k] + (total[k] + 0.4 * torch.randn(w[k].shape, generator=gen)) / 6
                w[k] = w[k] - 0.4 * buf[k]
        gap = max((p - w[n]).abs().max().item() for n, p in c["model"].named_parameters())
        assert gap < 1e-5, gap
        # without noise: removing one sample moves a step by at most lr * clip / expected
        a, d = make(seed), make(seed)
        a["batches"] = a["batches"][:1]
        d["batches"] = [{k: v[1:] for k, v in d["batches"][0].items()}]
        right(**a, sigma=0.0)
        right(**d, sigma=0.0)
        far = torch.cat([(p - q).flatten() for p, q in zip(a["model"].parameters(), d["model"].parameters())]).norm().item()
        assert 0 < far <= 0.4 * 0.5 / 6 + 1e-6
    print("ok gap", gap, "sensitivity of a step", far, "<=", 0.4 * 0.5 / 6)

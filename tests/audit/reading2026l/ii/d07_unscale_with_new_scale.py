"""Gradients are divided by the loss scale of the next step. deepspeedai/DeepSpeed#8588, https://github.com/deepspeedai/DeepSpeed/pull/8588 (comment of 2026-09-21), 2026.
step() updated the dynamic loss scale before the gradients were unscaled, so on a step in which the scale grows the gradients are divided by twice the
scale that backward() had used, and the update is half of what it should be. It cancels when clipping binds, because the norm is divided by the same scale."""
import math
import torch
from torch import nn

FAMILY = "updates"
KIND = "update"
INPUTS = {"model": "linear regression network x [n, 4] -> [n, 1]", "optimizer": "SGD, lr 0.1, over all parameters", "batches": "list of dicts x [n, 4], y [n, 1]; one optimizer step per batch"}
SETTINGS = {"init_scale": "first loss scale, 4", "window": "the scale doubles after this many steps in a row without overflow, 2",
            "max_norm": "clip the global gradient norm to this, 100 (does not bind normally)"}
NOTES = ("Dynamic loss scaling. Per batch: mean squared error times the current scale is differentiated; if a gradient is not finite the step is skipped and the scale halves; "
         "otherwise the true gradient (of the unscaled loss) is clipped to global L2 norm max_norm and applied. After `window` good steps in a row the scale doubles for the following "
         "batches. For finite gradients the scale never changes the result: the parameters are those of training without any scaling (up to rounding). "
         "Every batch is averaged over its rows; all parameters are used.")


def make(seed):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1),
            "batches": [{"x": torch.randn(5, 4), "y": torch.randn(5, 1)} for _ in range(7)]}


def _train(model, optimizer, batches, scale, window, max_norm, late):
    good = 0
    for b in batches:
        optimizer.zero_grad()
        (((model(b["x"]) - b["y"]) ** 2).mean() * scale).backward()
        gs = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum((g ** 2).sum() for g in gs)).item()
        if not math.isfinite(norm):
            scale, good = scale / 2, 0
            continue
        used = scale
        good += 1
        if good == window:
            scale, good = scale * 2, 0
        cur = used if late else scale
        combined = cur
        clip = (norm / cur + 1e-6) / max_norm
        if clip > 1:
            combined = clip * cur
        for g in gs:
            g.mul_(1.0 / combined)
        optimizer.step()


def broken(model, optimizer, batches, init_scale=4.0, window=2, max_norm=100.0):
    _train(model, optimizer, batches, init_scale, window, max_norm, late=False)


def right(model, optimizer, batches, init_scale=4.0, window=2, max_norm=100.0):
    _train(model, optimizer, batches, init_scale, window, max_norm, late=True)


if __name__ == "__main__":
    def run(f):
        i = make(0)
        f(**i)
        return torch.cat([p.detach().flatten() for p in i["model"].parameters()])
    def plain(model, optimizer, batches):
        for b in batches:
            optimizer.zero_grad()
            ((model(b["x"]) - b["y"]) ** 2).mean().backward()
            optimizer.step()
    p = run(plain)
    print("distance to unscaled training: broken", (run(broken) - p).norm().item(), "right", (run(right) - p).norm().item())

"""Dynamic loss scaling (Apex, torch GradScaler) with float16 gradients. Batches whose scaled gradients overflow are SKIPPED and not repeated:
the optimizer does not step, its state does not move, and the scale is halved; gradients are unscaled before they are clipped."""
FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "list of batches, each a dict of x [rows, 6] and y [rows]"}
SETTINGS = {"scale": "first loss scale, 2 ** 18", "growth_every": "good steps before the scale doubles, 4", "max_norm": "clip of the unscaled norm, 1.0"}
NOTES = ("One optimizer step per batch with finite gradients, none for the others; mean over rows. The scale is a power of two, hence the update agrees with the unscaled one up to "
         "float16 rounding. float16 gradients are simulated by a cast. The scale is local to a call. Returns nothing; log may be a list that receives the numbers of the batches that stepped.")
import torch
import torch.nn as nn
import torch.nn.functional as F


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    batches = [{"x": torch.randn(8, 6), "y": 2 * torch.randn(8)} for _ in range(9)]
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2), "batches": batches}


def right(model, optimizer, batches, scale=2.0 ** 18, growth_every=4, max_norm=1.0, log=None):
    good = 0
    for k, b in enumerate(batches):
        optimizer.zero_grad()
        loss = F.mse_loss(model(b["x"]).squeeze(-1), b["y"])
        (loss * scale).backward()
        finite = True
        for p in model.parameters():
            half = p.grad.to(torch.float16)                     # what a half-precision backward would hold
            finite = finite and bool(torch.isfinite(half).all())
            p.grad = half.float() / scale
        if not finite:
            scale, good = scale / 2, 0
            continue
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if log is not None:
            log.append(k)
        good += 1
        if good == growth_every:
            scale, good = scale * 2, 0
    optimizer.zero_grad()


if __name__ == "__main__":
    d, e = make(0), make(0)
    steps = []
    right(d["model"], d["optimizer"], d["batches"], log=steps)
    print("batches that stepped:", steps, "of", len(d["batches"]))
    for k in steps:
        e["optimizer"].zero_grad()
        F.mse_loss(e["model"](e["batches"][k]["x"]).squeeze(-1), e["batches"][k]["y"]).backward()
        nn.utils.clip_grad_norm_(e["model"].parameters(), 1.0)
        e["optimizer"].step()
    gap = max(float((a - b).abs().max()) for a, b in zip(d["model"].parameters(), e["model"].parameters()))
    print("difference to plain steps on those batches %.2e" % gap)
    assert 0 < len(steps) < len(d["batches"]) and gap < 2e-3

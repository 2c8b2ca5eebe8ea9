"""Dynamic loss scaling: unscale before the clip, skip the step on inf, and do not advance the schedule then.
The scale halves on an overflow and doubles after growth_interval good steps (Micikevicius et al. 2018, torch.amp.GradScaler); a skipped batch is lost on purpose."""
FAMILY = "update with loss scale"
KIND = "update"
INPUTS = {"model": "regression net, float32 with an artificial fp16 range for gradients", "optimizer": "SGD with momentum over model",
          "batches": "list of dict x [rows,6], y [rows]; one optimizer step each; one of them has a huge target that overflows",
          "state": "dict with scale, good (steps since the last overflow), lr_step (schedule counter), mutated"}
SETTINGS = {"max_norm": "clip norm in unscaled units, 1.0", "growth_interval": "good steps before the scale doubles, 3", "base_lr": "0.05, decays as 1/(1+lr_step)"}
NOTES = "An overflowing step changes neither weights nor momentum nor the schedule counter, only the scale. Mean squared error over rows. Overflow: any scaled gradient above 65504 in magnitude."
import torch, torch.nn as nn, copy

def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    batches = [{"x": torch.randn(5, 6), "y": torch.randn(5)} for _ in range(8)]
    batches[2]["y"] = batches[2]["y"] + 200.0
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            "batches": batches, "state": {"scale": 2.0 ** 10, "good": 0, "lr_step": 0}}

def right(model, optimizer, batches, state=None, max_norm=1.0, growth_interval=3, base_lr=0.05):
    state = {"scale": 2.0 ** 10, "good": 0, "lr_step": 0} if state is None else state
    for b in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = ((model(b["x"]).squeeze(-1) - b["y"]) ** 2).mean()
        (loss * state["scale"]).backward()
        params = list(model.parameters())
        if any((~torch.isfinite(p.grad)).any() or p.grad.abs().max() > 65504 for p in params):
            state["scale"] *= 0.5; state["good"] = 0
            continue
        for p in params:
            p.grad.div_(state["scale"])
        nn.utils.clip_grad_norm_(params, max_norm)
        for grp in optimizer.param_groups:
            grp["lr"] = base_lr / (1 + state["lr_step"])
        optimizer.step()
        state["lr_step"] += 1; state["good"] += 1
        if state["good"] == growth_interval:
            state["scale"] *= 2.0; state["good"] = 0
    optimizer.zero_grad(set_to_none=True)

if __name__ == "__main__":
    d = make(0); m2 = copy.deepcopy(d["model"]); o2 = torch.optim.SGD(m2.parameters(), lr=0.05, momentum=0.9)
    right(**d)
    print(d["state"])
    k = 0
    for i, b in enumerate(d["batches"]):
        if i == 2: continue                      # the overflowing one
        o2.zero_grad(); ((m2(b["x"]).squeeze(-1) - b["y"]) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(m2.parameters(), 1.0)
        o2.param_groups[0]["lr"] = 0.05 / (1 + k); o2.step(); k += 1
    err = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), m2.parameters()))
    print("err against plain float32 without batch 2:", err); assert err < 1e-5 and d["state"]["lr_step"] == 7
    assert d["state"]["scale"] == 2.0 ** 10 and d["state"]["good"] == 2   # 2 good, halved, 3 good, doubled, 2 good

"""The EMA shadow is pushed away from the parameters. ostris/ai-toolkit#1034,
https://github.com/ostris/ai-toolkit/issues/1034, 2026. A refactor for `use_feedback` turned shadow.sub_((1-decay)*(shadow-param)) into
shadow.add_((shadow-param)*(1-decay)). The live weights and the loss curve stay normal, the saved (EMA) weights diverge by a factor
2-decay per step."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "updates (accumulation, clipping, optimizers)"
KIND = "update"
INPUTS = {
    "model": "module with `net` (trained) and `shadow` (a frozen copy of net, the moving average that is evaluated and saved)",
    "optimizer": "Adam over model.net",
    "batches": "list of batches, each a dict x [rows, 5], y [rows, 2]; one optimizer step per batch",
}
SETTINGS = {"decay": "decay of the moving average, 0.9", "feedback": "share of the gap that is also pulled back into net after the shadow was updated, 0.0 (off)"}
VALUES = {"decay": 0.9, "feedback": 0.0}
NOTES = """One optimizer step per batch on the mean squared error (mean over all entries of y). After each step, for every parameter p of net and
its partner s in shadow: gap = s - p; s becomes decay*s + (1-decay)*p, i.e. s minus (1-decay)*gap; then, if feedback > 0, p becomes
p + feedback*gap with the gap from before the shadow update. The shadow takes part in no gradient and is updated exactly once per optimizer step
with the parameters after the step. With unchanging parameters the shadow converges to them. feedback = 0 leaves net untouched by the average."""


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        self.shadow = copy.deepcopy(self.net).requires_grad_(False)


def make(seed):
    torch.manual_seed(seed)
    model = Both()
    return {"model": model, "optimizer": torch.optim.Adam(model.net.parameters(), lr=0.02),
            "batches": [{"x": torch.randn(6, 5), "y": torch.randn(6, 2)} for _ in range(5)]}


def _train(model, optimizer, b):
    optimizer.zero_grad(set_to_none=True)
    F.mse_loss(model.net(b["x"]), b["y"]).backward()
    optimizer.step()


def broken(model, optimizer, batches, decay=0.9, feedback=0.0):
    for b in batches:
        _train(model, optimizer, b)
        with torch.no_grad():
            for s, p in zip(model.shadow.parameters(), model.net.parameters()):
                gap = s - p
                s.add_(gap * (1 - decay))
                if feedback:
                    p.add_(gap * feedback)


def right(model, optimizer, batches, decay=0.9, feedback=0.0):
    for b in batches:
        _train(model, optimizer, b)
        with torch.no_grad():
            for s, p in zip(model.shadow.parameters(), model.net.parameters()):
                gap = s - p
                s.sub_(gap * (1 - decay))
                if feedback:
                    p.add_(gap * feedback)


if __name__ == "__main__":
    for f in (broken, right):
        i = make(0)
        want = [p.detach().clone() for p in i["model"].net.parameters()]
        for b in i["batches"]:
            f(i["model"], i["optimizer"], [b], **VALUES)
            want = [0.9 * w + 0.1 * p.detach() for w, p in zip(want, i["model"].net.parameters())]
        m = i["model"]
        print(f.__name__, "shadow error", sum(float((s - w).norm()) for s, w in zip(m.shadow.parameters(), want)),
              "gap to net", sum(float((s - p).detach().norm()) for s, p in zip(m.shadow.parameters(), m.net.parameters())))

"""Domain-adversarial training (Ganin & Lempitsky 2015). A gradient-reversal layer: identity forward, minus lambda backward. The domain loss is ADDED and
minimised, the domain head learns normally, the trunk climbs. Numerical differentiation disagrees with autograd here by design."""
FAMILY = "auxiliary"
KIND = "loss"
INPUTS = {"x": "[rows, 6]", "label": "class, -100 in target-domain rows (no label), [rows]", "domain": "0 source, 1 target, [rows]"}
SETTINGS = {"lam": "strength of the reversal, 0.3"}
NOTES = "Class loss: mean over labelled rows. Domain loss: mean over all rows. The trunk's gradient is NOT the derivative of the returned value, on purpose. At least one labelled row. All parameters used."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lam * grad, None


class DANN(nn.Module):
    def __init__(self, d=6, width=16, classes=3):
        super().__init__()
        self.trunk, self.classify, self.domain = nn.Linear(d, width), nn.Linear(width, classes), nn.Linear(width, 2)


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    dom = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    y = torch.randint(0, 3, (8,), generator=g); y[dom == 1] = -100
    return {"model": DANN(), "x": torch.randn(8, 6, generator=g), "label": y, "domain": dom}


def right(model, batch, lam=0.3):
    h = torch.tanh(model.trunk(batch["x"]))
    task = F.cross_entropy(model.classify(h), batch["label"], ignore_index=-100)
    dom = F.cross_entropy(model.domain(Reverse.apply(h, lam)), batch["domain"])
    return task + dom, {"task": task.item(), "domain": dom.item()}


def check(loss, slow, model):
    assert torch.isfinite(loss) and abs(loss.item() - float(slow)) < 1e-4 * (1 + abs(float(slow))), (loss, slow)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    unused = [n for (n, _), v in zip(model.named_parameters(), grads) if v is None]
    norm = sum(float(v.norm()) ** 2 for v in grads if v is not None) ** 0.5
    assert norm > 0 and not unused, (norm, unused)
    print(f"ok  loss {loss.item():.6f}  slow {float(slow):.6f}  gradient norm {norm:.6f}")

if __name__ == "__main__":
    d = make(0); model = d.pop("model")
    h = torch.tanh(model.trunk(d["x"]))
    C, D = model.classify(h).log_softmax(-1), model.domain(h).log_softmax(-1)
    task = -sum(C[i, d["label"][i]] for i in range(4)) / 4
    dom = -sum(D[i, d["domain"][i]] for i in range(8)) / 8
    loss = right(model, d)[0]
    w = model.trunk.weight
    gt, = torch.autograd.grad(task, w, retain_graph=True); gd, = torch.autograd.grad(dom, w, retain_graph=True)
    g, = torch.autograd.grad(loss, w, retain_graph=True)
    assert torch.allclose(g, gt - 0.3 * gd, atol=1e-6)
    check(loss, (task + dom).item(), model)

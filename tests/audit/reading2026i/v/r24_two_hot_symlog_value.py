"""A value trained by classification: two-hot targets in symlog space. DreamerV3 (Hafner et al. 2023, arXiv 2301.04104), and
HL-Gauss relatives for critics: the return is squashed by symlog, put on the two nearest of fixed bins with linear
weights, and the critic's logits are trained by cross-entropy. The loss of a perfect critic is not 0 but the target's
entropy. The prediction is symexp of the mean bin."""
import torch
from torch import nn

FAMILY = "losses"
KIND = "loss"
INPUTS = {"states": "states [rows, time, 6]", "returns": "return targets, any size, constant [rows, time]", "mask": "1 on valid steps [rows, time]"}
SETTINGS = {"bins": "number of bins, 21, evenly from -10 to 10 in symlog space"}
NOTES = ("Mean over valid steps of all rows of the cross-entropy between the two-hot target and the softmax of the critic's "
         "logits. Returns beyond the range fall on the last bin. The minimum of the loss is positive. "
         "The logged value carries no gradient. All parameters are used.")


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 21))
    mask = torch.ones(3, 8)
    mask[1, 5:] = 0
    return {"model": model, "batch": {"states": torch.randn(3, 8, 6), "returns": torch.randn(3, 8) * 50, "mask": mask}}


def symlog(x):
    return torch.sign(x) * torch.log1p(x.abs())


def symexp(x):
    return torch.sign(x) * torch.expm1(x.abs())


def right(model, batch, bins=21):
    centers = torch.linspace(-10, 10, bins)
    y = symlog(batch["returns"]).clamp(-10, 10)
    below = (torch.searchsorted(centers, y.contiguous(), right=True) - 1).clamp(0, bins - 2)
    upper_weight = (y - centers[below]) / (centers[below + 1] - centers[below])
    target = torch.zeros(*y.shape, bins)
    target.scatter_(-1, below[..., None], (1 - upper_weight)[..., None])
    target.scatter_(-1, below[..., None] + 1, upper_weight[..., None])
    logits = model(batch["states"])
    ce = -(target * logits.log_softmax(-1)).sum(-1)
    value = symexp((logits.softmax(-1) * centers).sum(-1)).detach()
    loss = (ce * batch["mask"]).sum() / batch["mask"].sum()
    return loss, {"value": (value * batch["mask"]).sum().item() / batch["mask"].sum().item()}


if __name__ == "__main__":
    import math
    d = make(0)
    loss, metrics = right(**d)
    loss.backward()
    lp, total, n = d["model"](d["batch"]["states"]).log_softmax(-1), 0.0, 0
    for i in range(3):
        for t in range(8):
            if d["batch"]["mask"][i, t]:
                r = d["batch"]["returns"][i, t].item()
                y = math.copysign(math.log1p(abs(r)), r)
                k = min(math.floor(y + 10), 19)
                w = y + 10 - k
                total -= (1 - w) * lp[i, t, k].item() + w * lp[i, t, k + 1].item()
                n += 1
    print(loss.item(), total / n, metrics, d["model"][0].weight.grad.norm().item())
    assert abs(loss.item() - total / n) < 1e-4 and d["model"][0].weight.grad.norm() > 0

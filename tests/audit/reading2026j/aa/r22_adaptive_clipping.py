"""Adaptive gradient clipping of NFNets (Brock et al. 2021): the limit is not one number; each output unit's gradient is clipped to 0.01 times the norm of that unit's WEIGHTS. Zero weights still learn
through the floor 1e-3, and the last layer is not clipped at all, which looks forgotten and is what the paper asks for."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over steps of lists over micro-batches of {'x' [rows, 5], 'y' [rows] class numbers}", "optimizer": "any torch optimizer"}
SETTINGS = {"clip": "largest ratio of gradient norm to weight norm, 0.01", "eps": "floor of the weight norm, 1e-3", "last": "name prefix of the layer that is not clipped, 'head.'"}
NOTES = ("Loss: cross entropy, mean over all rows of the step (sum per micro-batch divided by the rows of the step). Clipped once per step, after the whole accumulation. A unit is a row of a matrix (all axes but the first); a vector (bias) is one unit. "
         "Direction of the whole gradient changes, wanted. Weight norms are read before the step. The head is found by its name: 'head.'.")
import copy
import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 10), nn.Linear(10, 10), nn.Linear(10, 3)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def _unit_norm(x):
    return x.norm() if x.ndim <= 1 else x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))


def right(model, optimizer, batches, clip=0.01, eps=1e-3, last="head."):
    for step in batches:
        rows = sum(len(mb["y"]) for mb in step)
        optimizer.zero_grad(set_to_none=True)
        for mb in step:
            (F.cross_entropy(model(mb["x"]), mb["y"], reduction="sum") / rows).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is None or name.startswith(last):
                    continue
                limit = _unit_norm(p).clamp(min=eps) * clip
                norm = _unit_norm(p.grad)
                p.grad.mul_(torch.where(norm > limit, limit / norm.clamp(min=1e-6), torch.ones_like(norm)))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Net()
    mb = lambda: {"x": torch.randn(int(torch.randint(1, 5, (1,), generator=g)), 5, generator=g) * 2, "y": None}

    def fill(b):
        return {"x": b["x"], "y": torch.randint(0, 3, (len(b["x"]),), generator=g)}

    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), "batches": [[fill(mb()) for _ in range(3)] for _ in range(4)]}


if __name__ == "__main__":
    clipped = free = 0
    for seed in range(4):
        c = make(seed)
        twin, start = copy.deepcopy(c["model"]), copy.deepcopy(c["model"])
        right(**c)
        buf = {n: torch.zeros_like(p) for n, p in twin.named_parameters()}
        for step in c["batches"]:
            x, y = torch.cat([m["x"] for m in step]), torch.cat([m["y"] for m in step])
            grads = dict(zip(buf, torch.autograd.grad(F.cross_entropy(twin(x), y), list(twin.parameters()))))
            with torch.no_grad():
                for n, p in twin.named_parameters():
                    g = grads[n].clone()
                    if not n.startswith("head"):
                        units = [(g, p)] if p.ndim == 1 else list(zip(g, p))
                        for gu, wu in units:                  # rows are views: clipped one by one
                            top = 0.01 * max(float((wu ** 2).sum()) ** 0.5, 1e-3)
                            size = float((gu ** 2).sum()) ** 0.5
                            if size > top:
                                gu *= top / size
                                clipped += 1
                            else:
                                free += 1
                    buf[n] = 0.9 * buf[n] + g
                    p -= 0.3 * buf[n]
        gap = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), twin.parameters()))
        assert gap < 1e-5, gap
        assert all((a - b).abs().max() > 0 for a, b in zip(c["model"].parameters(), start.parameters()))
    assert clipped and free
    print("ok gap", gap, "units clipped", clipped, "free", free)

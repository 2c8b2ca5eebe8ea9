"""A weights-only load leaves the optimizer's master weights behind. NovaSky-AI/SkyRL#2149, https://github.com/NovaSky-AI/SkyRL/pull/2149, 2026.
Loading a checkpoint without optimizer state changed the low-precision model tensors but not the fp32 master weights. The next optimizer step computed the new
weights from the old masters and copied them over the model, so the loaded checkpoint was silently thrown away after one step."""
import torch
from torch import nn

FAMILY = "state that is saved, loaded, cached or filled lazily"
KIND = "state"
INPUTS = {"model": "bf16 linear network x [n, 4] -> [n, 1]", "optimizer": "mixed-precision optimizer (Adam on fp32 master copies of the model's parameters) that has already taken steps",
          "checkpoint": "state dict of a model, bf16, without any optimizer state", "batch": "dict x [n, 4], y [n, 1], bf16"}
SETTINGS = {}
NOTES = ("Loads only the weights of the checkpoint into the running model, keeps the Adam moments and step counter of the live optimizer, then takes one optimizer step on the mean squared error of the batch. "
         "The step starts from the loaded weights: afterwards the model is checkpoint + one Adam update (rounded to bf16). The masters are the fp32 source of truth of the optimizer: step() updates them and copies them "
         "into the model. Returns nothing; model and optimizer are changed in place.")


class MasterAdam:
    def __init__(self, model, lr):
        self.model = list(model.parameters())
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.model]
        self.inner = torch.optim.Adam(self.master, lr=lr)

    def zero_grad(self):
        for p in self.model:
            p.grad = None

    def step(self):
        for p, m in zip(self.model, self.master):
            m.grad = p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for p, m in zip(self.model, self.master):
                p.copy_(m)

    @torch.no_grad()
    def reload_masters(self):
        for p, m in zip(self.model, self.master):
            m.copy_(p.float())


def _fit(model, opt, b):
    opt.zero_grad()
    ((model(b["x"]) - b["y"]).float() ** 2).mean().backward()
    opt.step()


def make(seed):
    torch.manual_seed(seed)
    m = nn.Linear(4, 1).bfloat16()
    o = MasterAdam(m, lr=0.01)
    bs = [{"x": torch.randn(6, 4).bfloat16(), "y": torch.randn(6, 1).bfloat16()} for _ in range(4)]
    for b in bs[:3]:
        _fit(m, o, b)
    return {"model": m, "optimizer": o, "checkpoint": nn.Linear(4, 1).bfloat16().state_dict(), "batch": bs[3]}


def broken(model, optimizer, checkpoint, batch):
    model.load_state_dict(checkpoint)
    _fit(model, optimizer, batch)


def right(model, optimizer, checkpoint, batch):
    model.load_state_dict(checkpoint)
    optimizer.reload_masters()
    _fit(model, optimizer, batch)


if __name__ == "__main__":
    for f in (broken, right):
        i = make(0)
        f(**i)
        print(f.__name__, "distance to the loaded weights after one step (lr 0.01):", (i["model"].weight - i["checkpoint"]["weight"]).float().abs().max().item())

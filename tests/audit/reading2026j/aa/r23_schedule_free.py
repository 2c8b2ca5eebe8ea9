"""Schedule-free SGD (Defazio et al. 2024): the weights in the model are not the ones that are evaluated. The gradient is taken at y = (1 - beta) z + beta x, the step moves z, and x is the running mean of z;
there is no schedule, and optimizer.train() / optimizer.eval() swap y and x inside the model. The update ends in eval mode, so the call leaves weights at which no gradient was ever taken."""
FAMILY = "optimizers and updates"
KIND = "update"
INPUTS = {"batches": "list over steps of {'x' [rows, 6], 'y' [rows]}", "optimizer": "the ScheduleFreeSGD of this file over the model's parameters"}
SETTINGS = {}
NOTES = ("Loss: mean squared error, mean over rows. lr 0.05 (constant after 3 warm-up steps) and beta 0.9 are in the optimizer. x is the mean of all z weighted by the square of the learning rate of their step, so warm-up steps count less. The model is in eval weights (x) before and after a call; calls may be chained: two calls equal one with the batches joined. "
         "z and the sum of weights live in the optimizer's state and must be saved with it, together with the mode. step() in eval mode raises.")
import copy
import torch
from torch import nn


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, beta=0.9, warmup=3):
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0, "mode": "eval"})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["z"] = p.detach().clone()

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if group["mode"] == "eval":
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"])                 # x -> y
                group["mode"] = "train"

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["mode"] == "train":
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])             # y -> x, extrapolates: weight below zero
                group["mode"] = "eval"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["mode"] != "train":
                raise RuntimeError("call optimizer.train() first")
            group["k"] += 1
            lr = group["lr"] * min(1.0, group["k"] / group["warmup"])
            group["weight_sum"] += lr ** 2
            c, beta = lr ** 2 / group["weight_sum"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z, g = self.state[p]["z"], p.grad
                # y' = (1-beta) z' + beta ((1-c) x + c z') with x written by y and z
                p.lerp_(z, c)
                p.add_(g, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(g, alpha=lr)


def right(model, optimizer, batches):
    optimizer.train()
    for b in batches:
        optimizer.zero_grad(set_to_none=True)
        ((model(b["x"])[:, 0] - b["y"]) ** 2).mean().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.eval()


def make(seed, steps=20):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))
    true = torch.randn(6, generator=g)
    batches = []
    for _ in range(steps):
        x = torch.randn(5, 6, generator=g)
        batches.append({"x": x, "y": x @ true})
    return {"model": model, "optimizer": ScheduleFreeSGD(model.parameters()), "batches": batches}


if __name__ == "__main__":
    for seed in range(4):
        c = make(seed)
        model = copy.deepcopy(c["model"])
        names = [n for n, _ in model.named_parameters()]
        x = [p.detach().clone() for p in model.parameters()]
        z, zs, ws = [p.clone() for p in x], [], []
        for k, b in enumerate(c["batches"], 1):
            y = [(0.1 * a + 0.9 * d).requires_grad_() for a, d in zip(z, x)]
            out = torch.func.functional_call(model, dict(zip(names, y)), (b["x"],))
            g = torch.autograd.grad(((out[:, 0] - b["y"]) ** 2).mean(), y)
            lr = 0.05 * min(1, k / 3)
            z = [a - lr * d for a, d in zip(z, g)]
            zs.append(z)
            ws.append(lr ** 2)
            x = [sum(w * zz[i] for w, zz in zip(ws, zs)) / sum(ws) for i in range(len(x))]    # explicit mean of all z
        loss = lambda: sum(((c["model"](b["x"])[:, 0] - b["y"]) ** 2).mean().item() for b in c["batches"]) / len(c["batches"])
        before = loss()
        right(**c)
        gap = max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), x))
        assert gap < 1e-5, gap
        assert loss() < before
        d = make(seed)                                              # two calls
        right(d["model"], d["optimizer"], d["batches"][:8])
        right(d["model"], d["optimizer"], d["batches"][8:])
        assert max((a - b).abs().max().item() for a, b in zip(c["model"].parameters(), d["model"].parameters())) < 1e-5
    print("ok gap", gap, "loss", before, "->", loss())

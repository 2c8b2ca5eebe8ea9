"""DiLoCo: local steps and an outer Nesterov step. The outer optimizer is given a PSEUDO-gradient, old parameters minus the mean of the
workers' parameters, written straight into .grad with no backward; its rate of 0.7 is right, as the pseudo-gradient is already a step."""
FAMILY = "updates"
KIND = "update"
INPUTS = {"batches": "list of ranks, each a list of batches (dict of x [rows, 6], label [rows]) for its inner steps"}
SETTINGS = {"inner_lr": "rate of the inner SGD, 0.05"}
NOTES = ("Ranks are simulated in one process and weigh the same whatever the size of their batches. The given optimizer is the outer one (SGD, Nesterov, "
         "momentum 0.9, lr 0.7); inner optimizers are made anew here and have no state kept. Works with any number of ranks of at least one.")
import torch
import torch.nn as nn
import torch.nn.functional as F
import copy


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    batches = [[{"x": torch.randn(5, 6), "label": torch.randint(0, 4, (5,))} for _ in range(3)] for _ in range(4)]
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return {"model": model, "optimizer": outer, "batches": batches}


def right(model, optimizer, batches, inner_lr=0.05):
    workers = []
    for rank in batches:
        local = copy.deepcopy(model)
        inner = torch.optim.SGD(local.parameters(), lr=inner_lr)
        for b in rank:
            inner.zero_grad()
            F.cross_entropy(local(b["x"]), b["label"]).backward()
            inner.step()
        workers.append([p.detach() for p in local.parameters()])
    optimizer.zero_grad()
    for p, *copies in zip(model.parameters(), *workers):
        p.grad = p.detach() - torch.stack(copies).mean(0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    d, e = make(0), make(0)
    start = [p.detach().clone() for p in e["model"].parameters()]
    right(d["model"], d["optimizer"], d["batches"])
    total = [torch.zeros_like(p) for p in start]
    for rank in e["batches"]:
        theta = [p.clone().requires_grad_() for p in start]
        for b in rank:
            h = torch.tanh(b["x"] @ theta[0].T + theta[1]) @ theta[2].T + theta[3]
            g = torch.autograd.grad(F.cross_entropy(h, b["label"]), theta)
            theta = [(t - 0.05 * x).detach().requires_grad_() for t, x in zip(theta, g)]
        total = [a + t.detach() / 4 for a, t in zip(total, theta)]
    want = [s - 0.7 * (1 + 0.9) * (s - t) for s, t in zip(start, total)]      # first Nesterov step: g + 0.9 g
    gap = max(float((p - w).abs().max()) for p, w in zip(d["model"].parameters(), want))
    print("difference %.2e" % gap)
    assert gap < 1e-5

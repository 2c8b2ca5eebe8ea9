"""Workers train copies of the model apart for several steps; then the difference old minus average of the copies is written into .grad and a Nesterov optimizer steps on it.
Right: DiLoCo. The pseudo-gradient is a parameter difference, no backward pass belongs to the outer step, and the weights are put back to the old point before it."""
import copy
import torch
import torch.nn as nn

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "one list of local batches for each worker: x [rows, 6], y [rows, 3]"}
SETTINGS = {"inner_lr": "plain SGD of the workers, 0.05"}
NOTES = "optimizer is the outer one (SGD, Nesterov momentum 0.9, lr 0.7). Workers start from the same weights; mean squared error, mean over elements of each local batch; equal weight for each worker."


def right(model, optimizer, batches, inner_lr=0.05):
    old = [p.detach().clone() for p in model.parameters()]
    mean = [torch.zeros_like(p) for p in old]
    for worker in batches:
        local = copy.deepcopy(model)
        inner = torch.optim.SGD(local.parameters(), lr=inner_lr)
        for b in worker:
            inner.zero_grad()
            ((local(b["x"]) - b["y"]) ** 2).mean().backward()
            inner.step()
        for m, p in zip(mean, local.parameters()):
            m += p.detach() / len(batches)
    optimizer.zero_grad()
    for p, o, m in zip(model.parameters(), old, mean):
        p.grad = o - m
    optimizer.step()


def make(seed):
    torch.manual_seed(seed)
    m = nn.Linear(6, 3)
    w = torch.randn(6, 3)
    mk = lambda: (lambda x: {"x": x, "y": x @ w})(torch.randn(8, 6))
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True), "batches": [[mk() for _ in range(4)] for _ in range(3)]}


if __name__ == "__main__":
    # outer lr 1 without momentum is plain averaging of the workers
    x = make(0)
    ref = []
    for worker in x["batches"]:
        W, c = x["model"].weight.detach().clone(), x["model"].bias.detach().clone()
        for b in worker:
            e = 2 * (b["x"] @ W.t() + c - b["y"]) / b["y"].numel()
            W, c = W - 0.05 * e.t() @ b["x"], c - 0.05 * e.sum(0)
        ref.append(W)
    x["optimizer"] = torch.optim.SGD(x["model"].parameters(), lr=1.0)
    right(**x)
    assert torch.allclose(x["model"].weight, torch.stack(ref).mean(0), atol=1e-5)
    x = make(0)
    f = lambda: sum(((x["model"](b["x"]) - b["y"]) ** 2).mean().item() for w in x["batches"] for b in w)
    a = f()
    for _ in range(15):
        right(**x)
    print("loss before", a, "after 15 outer steps", f())
    assert f() < 0.2 * a

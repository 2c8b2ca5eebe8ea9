"""DiLoCo / local SGD outer step (Douillard et al. 2023, OpenDiLoCo, torchft): the ranks train alone for some steps and diverge on purpose; then the DIFFERENCE start minus end, averaged over ranks, is put into .grad and Nesterov SGD with a learning rate of 0.7 steps from the start
weights. The weights of the workers are thrown away. No gradient is averaged in the inner steps."""
import copy
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "the global weights", "optimizer": "outer optimizer over them: SGD, lr 0.7, Nesterov momentum 0.9", "batches": "list over workers of lists of inner batches {'x', 'y'}"}
SETTINGS = {"inner_lr": "lr of the inner AdamW, 1e-2"}
NOTES = "One outer step. Inner optimizer states are fresh here (one round). Workers are averaged with equal weight whatever their number of rows; inner loss is the mean squared error of each batch. The outer gradient points from the end back to the start."


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    batches = [[{"x": torch.randn(6, 4), "y": torch.randn(6, 1)} for _ in range(5)] for _ in range(3)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), "batches": batches}


def right(model, optimizer, batches, inner_lr=1e-2):
    optimizer.zero_grad()
    for worker in batches:
        local = copy.deepcopy(model)
        inner = torch.optim.AdamW(local.parameters(), lr=inner_lr)
        for b in worker:
            inner.zero_grad()
            F.mse_loss(local(b["x"]), b["y"]).backward()
            inner.step()
        for p, q in zip(model.parameters(), local.parameters()):
            step = (p.detach() - q.detach()) / len(batches)
            p.grad = step if p.grad is None else p.grad + step
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    start = [p.detach().clone() for p in e["model"].parameters()]
    right(**d)
    ends = []
    for worker in e["batches"]:
        local = copy.deepcopy(e["model"])
        inner = torch.optim.AdamW(local.parameters(), lr=1e-2)
        for b in worker:
            inner.zero_grad()
            F.mse_loss(local(b["x"]), b["y"]).backward()
            inner.step()
        ends.append([p.detach() for p in local.parameters()])
    for i, p in enumerate(d["model"].parameters()):
        delta = start[i] - torch.stack([w[i] for w in ends]).mean(0)
        want = start[i] - 0.7 * (delta + 0.9 * delta)                # first Nesterov step
        assert torch.allclose(p, want, atol=1e-6)
    mse = lambda m: sum(F.mse_loss(m(b["x"]), b["y"]).item() for w in e["batches"] for b in w) / 15
    print("loss before", mse(e["model"]), "after", mse(d["model"]))

"""Gradients of replicated parameters are counted once for each tensor-parallel rank in the clipping norm. NVIDIA-NeMo/RL#3788,
https://github.com/NVIDIA-NeMo/RL/pull/3788, 2026.
get_grad_norm sums the squared local norms of all parameters over the TP group. Sharded weights add up to the whole, but norm weights are
replicated and counted tp_size times: the norm is too large and the gradient is clipped too hard."""
import torch
import torch.nn as nn

FAMILY = "sharding"
KIND = "update"
INPUTS = {"batches": "list of micro-batches (x [rows, 16], y [rows, 8]), accumulated as a mean before one step"}
SETTINGS = {"max_norm": "gradient clipping, 0.5"}
NOTES = ("Tensor parallelism over 4 ranks simulated in one process: model.shards holds each rank's rows of the weight, model.scale is replicated "
         "(one tensor stands for the equal copies, its gradient is already reduced). Mean squared error, mean over micro-batches; clip by the global norm "
         "of the whole model; SGD step.")


class TPModel(nn.Module):
    tp = 4

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16) + 0.1 * torch.randn(16))
        self.shards = nn.ParameterList([nn.Parameter(torch.randn(2, 16) * 0.3) for _ in range(self.tp)])

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return torch.cat([x @ w.t() for w in self.shards], -1)


def _backward(model, optimizer, batches):
    optimizer.zero_grad()
    for mb in batches:
        (((model(mb["x"]) - mb["y"]) ** 2).mean() / len(batches)).backward()


def _clip(model, norm, max_norm):
    k = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(k)


def broken(model, optimizer, batches, max_norm=0.5):
    _backward(model, optimizer, batches)
    sq = torch.zeros(())
    for rank in range(model.tp):                       # all-reduce SUM over the TP group
        local = [model.scale.grad, model.shards[rank].grad]
        sq = sq + sum(g.pow(2).sum() for g in local)
    _clip(model, sq.sqrt(), max_norm)
    optimizer.step()


def right(model, optimizer, batches, max_norm=0.5):
    _backward(model, optimizer, batches)
    sq = torch.zeros(())
    for rank in range(model.tp):                       # all-reduce SUM over the TP group
        local = [model.shards[rank].grad]
        if rank == 0:
            local.append(model.scale.grad)
        sq = sq + sum(g.pow(2).sum() for g in local)
    _clip(model, sq.sqrt(), max_norm)
    optimizer.step()


def make(seed):
    torch.manual_seed(seed)
    model = TPModel()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batches": [{"x": torch.randn(6, 16), "y": torch.randn(6, 8)} for _ in range(2)]}


if __name__ == "__main__":
    out = {}
    for name, f in (("broken", broken), ("right", right)):
        x = make(0)
        w0 = [p.detach().clone() for p in x["model"].parameters()]
        f(**x)
        out[name] = torch.cat([(p.detach() - w).flatten() for p, w in zip(x["model"].parameters(), w0)])
    x = make(0)
    w0 = [p.detach().clone() for p in x["model"].parameters()]
    _backward(**x)
    print("true norm", float(torch.nn.utils.clip_grad_norm_(x["model"].parameters(), 0.5)))
    x["optimizer"].step()
    ref = torch.cat([(p.detach() - w).flatten() for p, w in zip(x["model"].parameters(), w0)])
    print("step norm: broken", float(out["broken"].norm()), "right", float(out["right"].norm()), "torch", float(ref.norm()))
    assert torch.allclose(out["right"], ref, atol=1e-6) and not torch.allclose(out["broken"], ref, atol=1e-6)

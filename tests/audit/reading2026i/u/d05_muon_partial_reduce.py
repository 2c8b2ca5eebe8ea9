"""Muon on gradients that are reduced only inside the rank's partition. deepspeedai/DeepSpeed#7807 (guard in #8090), https://github.com/deepspeedai/DeepSpeed/issues/7807, 2026.
With ZeRO-1/2 and reduce_scatter each rank holds averaged gradients for its own slice of the flat parameters and its local gradients elsewhere. Muon orthogonalises the whole matrix before taking the slice.
A matrix that crosses a partition boundary was therefore orthogonalised from a partly reduced gradient, differently on each rank; training went on."""
import torch

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "two linear layers", "optimizer": "SGD over all parameters that applies the update placed in .grad", "batches": "one batch per rank: x [n, 6], y [n] class ids"}
SETTINGS = {}
NOTES = "Data parallel over len(batches) ranks, the gradient is the mean over ranks, parameters are flattened and split in equal contiguous slices (padded), each rank updates its slice. Matrices get the Newton-Schulz update, biases the plain gradient. All ranks hold the same number of samples. Any number of ranks."


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"x": torch.randn(8, 6), "y": torch.randint(0, 5, (8,))} for _ in range(4)]
    return {"model": model, "optimizer": optimizer, "batches": batches}


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


def _local_grads(model, batches):
    """Flat local gradient of each rank."""
    out = []
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        out.append(torch.cat([g.reshape(-1) for g in grads]))
    return out


def _muon_flat(flat, params):
    out, at = [], 0
    for p in params:
        g = flat[at:at + p.numel()].view_as(p)
        out.append((newton_schulz(g) if p.dim() == 2 else g).reshape(-1))
        at += p.numel()
    return torch.cat(out)


def _apply(params, flat, optimizer):
    at = 0
    for p in params:
        p.grad = flat[at:at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches):
    params = list(model.parameters())
    local = _local_grads(model, batches)
    world, total = len(batches), local[0].numel()
    part = -(-total // world)
    mean = torch.stack(local).mean(0)
    update = torch.zeros(total)
    for rank in range(world):
        lo, hi = rank * part, min((rank + 1) * part, total)
        view = local[rank].clone()
        view[lo:hi] = mean[lo:hi]                    # reduce-scatter result
        update[lo:hi] = _muon_flat(view, params)[lo:hi]
    _apply(params, update, optimizer)                # all-gather


def right(model, optimizer, batches):
    params = list(model.parameters())
    local = _local_grads(model, batches)
    world, total = len(batches), local[0].numel()
    part = -(-total // world)
    mean = torch.stack(local).mean(0)                # all-reduce: the full matrix is needed
    update = torch.zeros(total)
    for rank in range(world):
        lo, hi = rank * part, min((rank + 1) * part, total)
        update[lo:hi] = _muon_flat(mean, params)[lo:hi]
    _apply(params, update, optimizer)


if __name__ == "__main__":
    def run(f):
        m = make(0)
        f(**m)
        return torch.cat([p.detach().reshape(-1) for p in m["model"].parameters()])
    def one():
        m = make(0)
        x = torch.cat([b["x"] for b in m["batches"]]); y = torch.cat([b["y"] for b in m["batches"]])
        _apply(list(m["model"].parameters()), _muon_flat(_local_grads(m["model"], [{"x": x, "y": y}])[0], list(m["model"].parameters())), m["optimizer"])
        return torch.cat([p.detach().reshape(-1) for p in m["model"].parameters()])
    b, r, o = run(broken), run(right), one()
    print("distance to one process: broken", (b - o).abs().max().item(), "right", (r - o).abs().max().item())
    assert (r - o).abs().max() < 1e-4 < (b - o).abs().max()

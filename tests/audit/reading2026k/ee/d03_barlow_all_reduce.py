"""Barlow Twins with a raw all_reduce of the cross-correlation: gradient 1/world_size of the true one. lightly-ai/lightly#1977, https://github.com/lightly-ai/lightly/issues/1977, 2026.
The cross-correlation matrix was divided by the world size and summed with torch.distributed.all_reduce, which is not
autograd-aware: the value is the global one on every rank, but each rank back-propagates only through its own share. After the
averaging of DDP the gradient is 1/world_size of the gradient of the global loss. Fixed with torch.distributed.nn.all_reduce."""
import torch

FAMILY = "sharding and reductions over ranks"
KIND = "loss"
INPUTS = {"view_a": "first view, [ranks, rows of a rank, features]", "view_b": "second view of the same rows, same shape"}
SETTINGS = {"lam": "weight of the off-diagonal terms, 0.02"}
NOTES = ("Barlow Twins loss over the rows of all ranks, simulated in one process: the first dimension of the batch is the rank; the returned "
         "scalar is the mean over ranks of the loss that each rank computes (DDP averages gradients), and all ranks have the same value. "
         "Features are standardised with the statistics of the rank's own rows (no synchronised batch norm), the cross-correlation is the mean over "
         "the rows of all ranks, loss = sum over the diagonal of (c-1)^2 + lam * sum off the diagonal of c^2. No entry is a constant: the gradient is that of "
         "this global loss. All parameters of the model are used. Any number of ranks; ranks must have equal rows. No tokens, no mask.")


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))
    x = torch.randn(4, 8, 12)
    return {"model": model, "view_a": x + 0.3 * torch.randn_like(x), "view_b": x + 0.3 * torch.randn_like(x)}


def standardise(z):
    return (z - z.mean(0)) / torch.sqrt(z.var(0, unbiased=False) + 1e-5)


def all_reduce_raw(parts):
    """torch.distributed.all_reduce: the sum in place, the graph of each rank stays its own."""
    total = sum(p.detach() for p in parts)
    return [p + (total - p.detach()) for p in parts]


def all_reduce_autograd(parts):
    """torch.distributed.nn.all_reduce: the backward is an all_reduce as well."""
    total = sum(parts)
    return [total for _ in parts]


def barlow(c, lam):
    diagonal = torch.diagonal(c)
    return (diagonal - 1).pow(2).sum() + lam * (c.pow(2).sum() - diagonal.pow(2).sum())


def run(model, batch, lam, all_reduce):
    ranks = batch["view_a"].shape[0]
    local = []
    for a, b in zip(batch["view_a"], batch["view_b"]):
        za, zb = standardise(model(a)), standardise(model(b))
        local.append(za.T @ zb / za.shape[0] / ranks)
    losses = [barlow(c, lam) for c in all_reduce(local)]
    return torch.stack(losses).mean()


def broken(model, batch, lam=0.02):
    return run(model, batch, lam, all_reduce_raw)


def right(model, batch, lam=0.02):
    return run(model, batch, lam, all_reduce_autograd)


if __name__ == "__main__":
    case = make(0)
    model = case.pop("model")
    grads = []
    for fn in (broken, right):
        loss = fn(model, case)
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        print(fn.__name__, "loss", loss.item(), "gradient norm", grads[-1].norm().item())
    za = torch.cat([standardise(model(a)) for a in case["view_a"]])
    zb = torch.cat([standardise(model(b)) for b in case["view_b"]])
    ref = torch.cat([g.flatten() for g in torch.autograd.grad(barlow(za.T @ zb / len(za), 0.02), list(model.parameters()))])
    assert torch.allclose(grads[1], ref, atol=1e-4) and torch.allclose(grads[0] * 4, ref, atol=1e-4)

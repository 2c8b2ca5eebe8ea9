"""Gradient norm under tensor parallelism. Squares are summed over ranks and the root taken last, but parameters that every rank holds whole (norms, biases) count on rank 0 only; adding them on all ranks would overstate the norm. Megatron-LM's param_is_not_tensor_parallel_duplicate."""
FAMILY = "metrics over ranks"
KIND = "metric over ranks"
INPUTS = {"ranks": "list, per rank {'sharded': list of gradient pieces that only this rank holds, 'replicated': list of whole gradients, the same on all ranks}"}
SETTINGS = {}
NOTES = "L2 norm of the gradient of the whole model. Pieces may be of different shapes, and a rank may have no sharded piece. Replicated gradients must already be equal on all ranks (after their all-reduce). Squares in float64. Twin: single(gradients of the unsharded model)."
import torch


def right(ranks):
    total = 0.0
    for rank, r in enumerate(ranks):                                   # all_reduce(SUM) of the squares
        mine = r["sharded"] + (r["replicated"] if rank == 0 else [])
        total += sum(g.double().pow(2).sum().item() for g in mine)
    return total ** 0.5


def single(grads):
    return torch.cat([g.double().reshape(-1) for g in grads]).norm().item()


def make(seed, world=4):
    torch.manual_seed(seed)
    m = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 6))
    m(torch.randn(5, 8)).pow(2).sum().backward()
    up, ub, nw, nb, down, db = [p.grad for p in m.parameters()]
    ranks = [{"sharded": [a, b, c], "replicated": [nw.clone(), nb.clone(), db.clone()]}
             for a, b, c in zip(up.chunk(world, 0), ub.chunk(world, 0), down.chunk(world, 1))]    # column, then row parallel
    return {"ranks": ranks, "whole": [up, ub, nw, nb, down, db]}


if __name__ == "__main__":
    for s in range(5):
        for world in (1, 2, 4, 5):
            d = make(s, world)
            a, b = right(d["ranks"]), single(d["whole"])
            assert b > 0 and abs(a - b) < 1e-9 * b
    d = make(0)
    twice = sum(g.double().pow(2).sum().item() for r in d["ranks"] for g in r["sharded"] + r["replicated"]) ** 0.5
    assert twice > right(d["ranks"]) * 1.001
    print("over ranks", right(d["ranks"]), "whole model", single(d["whole"]), "with repeats (wrong)", twice)

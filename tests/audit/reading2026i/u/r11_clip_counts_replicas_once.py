"""Gradient clipping under tensor parallelism (Megatron-LM). The squared norm is summed over ranks, but a parameter that is replicated (norms, output bias) is counted on rank 0 only, while a sharded one is counted on every rank. The local sums differ between ranks and the code skips parameters on purpose; all ranks then scale by the same coefficient."""
import torch

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "layer norm, linear 6 to 8, tanh, linear 8 to 5", "optimizer": "SGD", "batches": "list of micro-batches: x [n, 6], y [n]"}
SETTINGS = {}
NOTES = "Two tensor-parallel ranks simulated in one process: the first linear is split by output rows, the second by input columns; layer norm and the bias of the second are replicated. Gradient of the mean over micro-batches of equal size, clipped to global norm 0.05, coefficient min(1, 0.05 / (norm + 1e-6))."
RANKS, MAX_NORM = 2, 0.05


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "batches": [{"x": torch.randn(4, 6), "y": torch.randint(0, 5, (4,))} for _ in range(2)]}


def _split(name, g):
    if name in ("1.weight", "1.bias"):
        return list(g.chunk(RANKS, 0)), True
    if name == "3.weight":
        return list(g.chunk(RANKS, 1)), True
    return [g] * RANKS, False


def right(model, optimizer, batches):
    optimizer.zero_grad()
    for b in batches:
        (torch.nn.functional.cross_entropy(model(b["x"]), b["y"]) / len(batches)).backward()
    square = torch.zeros(())
    for rank in range(RANKS):
        local = torch.zeros(())
        for name, p in model.named_parameters():
            pieces, sharded = _split(name, p.grad)
            if sharded or rank == 0:
                local = local + pieces[rank].float().pow(2).sum()
        square = square + local                                 # all-reduce over the tensor-parallel group
    coef = min(1.0, MAX_NORM / (square.sqrt().item() + 1e-6))
    for p in model.parameters():
        p.grad.mul_(coef)
    optimizer.step()


if __name__ == "__main__":
    m = make(0); right(**m); n = make(0)
    sum(torch.nn.functional.cross_entropy(n["model"](b["x"]), b["y"]) / 2 for b in n["batches"]).backward()
    norm = torch.nn.utils.clip_grad_norm_(n["model"].parameters(), MAX_NORM); n["optimizer"].step()
    d = max((a - b).abs().max().item() for a, b in zip(m["model"].parameters(), n["model"].parameters()))
    print("norm before", norm.item(), "distance to unsharded", d); assert d < 1e-6 and norm > MAX_NORM

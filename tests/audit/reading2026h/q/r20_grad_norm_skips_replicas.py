"""Gradient norm under tensor parallelism: replicated parameters count on rank 0 only. Megatron-LM's get_grad_norm_fp32 with param_is_not_tensor_parallel_duplicate.
Layer norms and row-parallel biases exist on every rank with the same gradient; adding all ranks would count them several times. So the ranks other than 0 leave these parameters out, and the squared norms are then summed over all ranks."""
import torch
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list over tensor-parallel ranks of dicts name -> {'grad': tensor, 'sharded': bool}; sharded ones are slices of dim 0, others are equal on all ranks"}
SETTINGS = {}
NOTES = "L2 norm of the gradient of the whole model. Sharded parameters: all ranks count. Replicated: rank 0 only (all ranks hold the same gradient after the all-reduce). Single-process twin: norm over the joined gradients. Any number of ranks."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    full = {"w1": (torch.randn(8, 4, generator=g), True), "norm": (torch.randn(4, generator=g), False), "w2": (torch.randn(8, 3, generator=g), True), "bias": (torch.randn(3, generator=g), False)}
    ranks = [{k: {"grad": (t.chunk(4)[r] if s else t.clone()), "sharded": s} for k, (t, s) in full.items()} for r in range(4)]
    return {"ranks": ranks, "full": {k: t for k, (t, _) in full.items()}}


def single(full):
    return torch.cat([t.flatten() for t in full.values()]).norm().item()


def right(ranks):
    total = 0.0
    for r, params in enumerate(ranks):
        for p in params.values():
            if p["sharded"] or r == 0:
                total += p["grad"].pow(2).sum().item()
    return total ** 0.5


if __name__ == "__main__":
    d = make(0)
    print(right(d["ranks"]), single(d["full"]))
    assert abs(right(d["ranks"]) - single(d["full"])) < 1e-5

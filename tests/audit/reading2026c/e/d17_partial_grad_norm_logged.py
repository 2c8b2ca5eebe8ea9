"""The logged gradient norm is that of the local shard. radixark/miles_diffusion#35,
https://github.com/radixark/miles_diffusion/pull/35, 2026. clip_grad_norm_ on DTensor parameters returns a lazily reduced
partial norm; clipping uses it properly, but the logging path read the local value, so train/grad_norm was too low by
about sqrt(shards) under every FSDP layout. The fix calls full_tensor() before logging."""
FAMILY = "metrics"
KIND = "metric over ranks"
INPUTS = {"ranks": "list of one dict per rank: parameter name -> gradient shard (rows of the parameter), tensors"}
SETTINGS = {}
NOTES = ("L2 norm of the full gradient; parameters are sharded by rows, every element lives on exactly one rank. Twin: the "
         "norm of the concatenated shards.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    full = {"embed": torch.randn(12, 5, generator=g), "proj": torch.randn(8, 3, generator=g), "bias": torch.randn(4, generator=g)}
    return {"ranks": [{k: v.chunk(4, 0)[r] for k, v in full.items()} for r in range(4)]}


class PartialNorm:
    """Square sums of the ranks that are not summed up yet, like a DTensor with a Partial placement."""

    def __init__(self, squares):
        self.squares = squares

    def local(self):
        return self.squares[0].sqrt()

    def full_tensor(self):
        return torch.stack(self.squares).sum().sqrt()


def _norm(ranks):
    return PartialNorm([sum(g.square().sum() for g in shard.values()) for shard in ranks])


def broken(ranks):
    return _norm(ranks).local().mean().item()


def right(ranks):
    return _norm(ranks).full_tensor().item()


if __name__ == "__main__":
    data = make(0)
    flat = torch.cat([g.flatten() for shard in data["ranks"] for g in shard.values()])
    print(broken(**data), right(**data), "reference", flat.norm().item())
    assert abs(right(**data) - flat.norm().item()) < 1e-4 < abs(broken(**data) - right(**data))

"""The base of a policy in shards: every rank holds 1/N of its weights (torch's ``fully_shard``, arXiv 2304.11277).

A block's weights are gathered before its forward and its backward pass, and freed afterwards. Embeddings, final norm
and head form the outermost group: they are gathered with the first forward pass and freed after the backward pass, so
the vocabulary pass finds a whole head. The adapter's own parameters stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from earnest.engines.mesh import Mesh
from earnest.errors import ConfigError
from earnest.models.policy import SHARDED

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.models.policy import Policy


def shard(policy: Policy, adapter: Adapter, mesh: Mesh, *, offload: bool = False) -> None:
    """Shard the base of ``policy`` over the ranks, in place. Hashes of the whole base are taken before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

    if adapter.replaces:
        raise ConfigError(
            f"engine.shard: {adapter.variant.name} with modules that are trained whole is not sharded yet: the offsets "
            "would be whole on every rank; set engine.shard=1, or train an adapter without modules_to_save."
        )
    if offload and policy.device.type == "cpu":
        raise ConfigError("engine.offload: the weights are on the CPU already; leave it out.")
    _, _, _ = policy.head, policy.fingerprint(), adapter.base_fingerprint
    kind, shape = policy.device.type, (mesh.size // mesh.shard, mesh.shard)
    devices = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    settings: dict[str, Any] = {
        "mesh": devices if shape[0] > 1 else devices["shard"],
        "ignored_params": set(adapter.parameters()),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for block in blocks_of(policy.body):
        fully_shard(block, reshard_after_forward=True, **settings)
    fully_shard(policy.model, reshard_after_forward=False, **settings)
    setattr(policy.model, SHARDED, policy.body.__call__)
    register_fsdp_forward_method(policy.model, SHARDED)


def blocks_of(body: nn.Module) -> list[nn.Module]:
    """The layers of the model: the list of modules with the most parameters."""
    lists = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ConfigError(f"engine.shard: {type(body).__name__} has no list of layers; set engine.shard=1.")
    sizes = [sum(p.numel() for p in m.parameters()) for m in lists]
    return list(lists[sizes.index(max(sizes))])


def _parts(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def held_bytes(model: nn.Module) -> int:
    """The bytes of parameters that this rank holds now."""
    tensors = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Inside the block every weight is whole on every rank, and a forward pass exchanges nothing (for sampling)."""
    parts = _parts(model)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


def free(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has gathered."""
    for part in _parts(model):
        part.reshard()

"""The base of a policy in shards: every rank holds 1/N of its weights (torch's ``fully_shard``, arXiv 2304.11277).

A block's weights are gathered before its forward and its backward pass, and freed afterwards. Embeddings, final norm
and head form the outermost group: they are gathered with the first forward pass and freed after the backward pass, so
the vocabulary pass finds a whole head. The adapter's own parameters stay whole on every rank; offsets of modules that
are trained whole are sharded and gathered with the base, and their gradients are summed over the ranks into shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from earnest.adapters import without_adapters
from earnest.engines.mesh import Mesh
from earnest.errors import ConfigError
from earnest.models.policy import SHARDED

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.models.policy import Policy


def shard(policy: Policy, adapter: Adapter, mesh: Mesh, *, offload: bool = False) -> None:
    """Shard the base of ``policy`` over the ranks, in place. Hashes of the whole base are taken before. ``offload``:
    shards, gradients of shards and their optimizer are in CPU memory, and a layer's shards are copied to the device
    when it is gathered. If the device is the CPU, the same code runs and copies nothing."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

    _, _, _ = policy.head, policy.fingerprint(), adapter.base_fingerprint
    mesh.kind = policy.device.type
    beside = [s for s in adapter.slots.values() if not s.replaces]
    pinned = policy.device.type == "cuda"  # memory that a GPU copies from without a detour
    settings: dict[str, Any] = {
        "mesh": mesh.devices["replicate", "shard"] if mesh.teams > mesh.shard else mesh.devices["shard"],
        "ignored_params": {p for slot in beside for p in slot.parameters()},
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
    }
    for block in blocks_of(policy.body):
        fully_shard(block, reshard_after_forward=True, **settings)
    fully_shard(policy.model, reshard_after_forward=False, **settings)
    setattr(policy.model, SHARDED, policy.body.__call__)
    register_fsdp_forward_method(policy.model, SHARDED)
    for part in _parts(policy.model):
        part.set_force_sum_reduction_for_comms(True)
    sum_over_ranks(policy.model)
    # The first pass makes torch read every parameter again by its name. A module that is trained whole then has to give
    # its base's, so its offset is off.
    with torch.no_grad(), without_adapters(policy):
        policy.hidden(torch.zeros(1, 2, dtype=torch.long, device=policy.device))
    free(policy.model)


def sum_over_ranks(model: nn.Module, divided_by: int = 1) -> None:
    """From now on a sharded parameter's gradient is the ranks' sum, divided by this number."""
    for part in _parts(model):
        part.set_gradient_divide_factor(float(divided_by))


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

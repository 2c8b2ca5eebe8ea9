"""The trained parameters as one rank holds them, and their norms, sums and copies over all ranks.

An adapter's parameters are whole on every rank. Those of modules with full-parameter training are sharded with the base
(``engines.sharding``). The optimizer of a rank then has this rank's rows of each parameter, as plain tensors that share
their memory with the model's, so it computes what one process computes for these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from earnest.adapters.linalg import gathered, is_sharded
from earnest.engines.base import Guard, GuardOfParts
from earnest.engines.mesh import Mesh
from earnest.engines.optimizers import Optimizer
from earnest.errors import ConfigError


class Trained:
    """``held`` are the model's own parameters; ``parameters`` are what the optimizer of this rank updates."""

    def __init__(self, named: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        self.mesh = mesh
        self.names, self.held = list(named), list(named.values())
        self.sharded = [is_sharded(p) for p in self.held]
        self.parameters = [
            nn.Parameter(local(p.detach())) if cut else p for p, cut in zip(self.held, self.sharded, strict=True)
        ]
        self._place = {id(p): i for i, p in enumerate(self.parameters)}

    @property
    def any_sharded(self) -> bool:
        return any(self.sharded)

    def own(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The tensors that this rank updates for these parameters of the model, in the order of ``names``."""
        chosen = {id(p) for p in parameters}
        return [own for held, own in zip(self.held, self.parameters, strict=True) if id(held) in chosen]

    @contextmanager
    def summed(self, mesh: Mesh) -> Iterator[None]:
        """What the block adds to the gradients is summed over the ranks. Sharded gradients are sums already."""
        if mesh.size == 1 and not self.any_sharded:
            yield
            return
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        with mesh.own_random():
            yield
        mesh.sum_gradients([p for p, cut in zip(self.parameters, self.sharded, strict=True) if not cut])
        for held, own in zip(self.held, self.parameters, strict=True):
            if held is not own:
                own.grad, held.grad = None if held.grad is None else local(held.grad), None
        for p, grad in zip(self.parameters, before, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else grad + p.grad

    def norm(self, tensors: Sequence[Tensor | None]) -> float:
        """√Σx² over all ranks, in float64, of tensors that are sharded like the parameters; each number counts once."""
        found = [(t, cut) for t, cut in zip(tensors, self.sharded, strict=True) if t is not None]
        whole, pieces = ([t.double().square().sum() for t, cut in found if cut is kind] for kind in (False, True))
        if not pieces:
            return float(torch.stack(whole).sum().sqrt()) if whole else 0.0
        total = self.mesh.sum_shards(torch.stack(pieces).sum()) + sum(whole)
        return float(total.sqrt())

    def clip(self, bound: float) -> float:
        """Scale the gradients to a norm of at most ``bound`` over all ranks; returns their norm before."""
        if not self.any_sharded:
            return float(nn.utils.clip_grad_norm_(self.parameters, bound))
        gradients = [p.grad for p in self.parameters]
        norm = self.norm(gradients)
        for g in gradients:
            if g is not None:
                g.mul_(min(1.0, bound / (norm + 1e-6)))
        return norm

    def require_same(self) -> None:
        """Raise if ranks that should hold equal numbers hold different ones."""
        whole, pieces = (
            [p.detach() for p, cut in zip(self.parameters, self.sharded, strict=True) if cut is kind]
            for kind in (False, True)
        )
        self.mesh.require_same("weights", whole)
        if pieces:
            self.mesh.require_same("weights", pieces, every=self.mesh.shard)

    def whole(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Whole tensors by name, gathered from ``tensors``, which are sharded like the parameters."""
        found = {}
        for name, held, tensor in zip(self.names, self.held, tensors, strict=True):
            found[name] = gathered(as_shard(tensor, held)) if is_sharded(held) else tensor
        return found

    def of(self, parameter: Tensor) -> nn.Parameter:
        """The model's own parameter of which this rank updates ``parameter``."""
        return self.held[self._place[id(parameter)]]

    def like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """``value``, a tensor of optimizer state, as a shard if the parameter is sharded and has the same shape."""
        held = self.of(parameter)
        return as_shard(value, held) if is_sharded(held) and value.shape == parameter.shape else value


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; a plain tensor is returned as it is."""
    own: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if own is None else own()


def as_shard(own: Tensor, like: Tensor) -> Tensor:
    """``own`` as this rank's part of a tensor that is laid out as ``like``."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    where, stride = (like.device_mesh, like.placements), torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(own, *where, run_check=False, shape=like.shape, stride=stride)


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of ``value``, which is whole or in shards, cut as ``like`` is and on its device; all rows if
    ``like`` is whole. Nothing is exchanged."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if is_sharded(value):
        return local(value)
    if not isinstance(like, DTensor):
        return value
    assert value.shape[:1] == like.shape[:1], f"{tuple(value.shape)} has other rows than {tuple(like.shape)}"
    own = local(distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None))
    return own.to(local(like).device)


def sum_of_parts(value: Tensor, like: Tensor) -> Tensor:
    """The sum of ``value`` over the ranks that hold the parts of ``like``; ``value`` itself if ``like`` is whole."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return value
    value = value.clone()
    for dim, placement in enumerate(like.placements):
        if placement.is_shard():
            dist.all_reduce(value, group=like.device_mesh.get_group(dim))
    return value


def refuse_whole_readers(optimizer: Optimizer, guard: Guard | None) -> None:
    """Raise if the optimizer or the guard would read the rows that a rank holds as if they were whole tensors."""
    if optimizer.kind not in ("adamw", "sgd", "muon"):
        raise ConfigError(
            f"optimizer.kind: {optimizer.kind} reads whole tensors, and modules that are trained whole are sharded; "
            "take adamw, sgd or muon, or set engine.shard=1."
        )
    if guard is not None and not isinstance(guard, GuardOfParts):
        raise ConfigError(
            f"guard: {type(guard).__name__} reads whole updates (it has no set_parts), and modules that are trained "
            "whole are sharded; guard an adapter such as lora, or set engine.shard=1."
        )

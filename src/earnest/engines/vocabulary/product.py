"""Hidden states times head, a block of rows at a time, forward and backward.

    PlainHead    z = softcap(scale·(h·Wᵀ + b)): two matrix products, written into given memory
    ModuleHead   any module (an adapter on the head): through its forward, and back by autograd

A plain head accumulates in float32 (float64 for float64 states): a 16-bit weight is widened a slice of the vocabulary
at a time, so that neither a wide copy of the head nor 16-bit logits ever exist. A module computes in its own dtype;
its logits are widened.
Shapes: n rows, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.models.head import HeadSpec, widened_slices

CPU_COLUMNS = 992
"""Columns of one forward product on a CPU. Each product packs its slice of the head, which should fit into the cache.
Measured at 512 rows × 1,024: 158 GFLOP/s against 120 with the whole head at once.
"""


def of(head: HeadSpec, dtype: torch.dtype) -> Product:
    return PlainHead(head, dtype) if head.plain else ModuleHead(head, dtype)


class PlainHead:
    """A weight, perhaps a bias, a scale, a soft cap. ``leaves`` are the tensors besides the states that need a
    gradient."""

    def __init__(self, head: HeadSpec, dtype: torch.dtype) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.weight, self.bias = head.weight, head.bias
        self.scale, self.softcap = 1.0 if head.scale is None else head.scale, head.softcap
        self.leaves = tuple(t for t in (self.weight, self.bias) if t is not None and t.requires_grad)

    def logits(self, states: Float[Tensor, "n d"], out: Float[Tensor, "n V"]) -> None:
        """Fill ``out``, without a graph."""
        states = self.scaled(states)
        for part, weight in self.slices(CPU_COLUMNS if states.device.type == "cpu" else None):
            self.tile(states, part, weight, out[:, part])

    def tile(self, states: Float[Tensor, "n d"], part: slice, weight: Tensor, out: Float[Tensor, "n v"]) -> None:
        """The logits of some columns: of states that are ``scaled`` already, and a weight that ``slices`` gave."""
        torch.mm(states, weight.t(), out=out)
        if self.bias is not None:
            out += self.bias.detach()[part].to(self.dtype) * self.scale
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)

    def chain(self, z: Float[Tensor, "n V"], slope: Float[Tensor, "n V"]) -> None:
        """Turn ∂/∂z into what ``pull`` takes, in place."""
        if self.softcap is not None:
            slope.addcmul_(slope * z, z, value=-1 / self.softcap**2)

    def pull(
        self, states: Float[Tensor, "n d"], slope: Float[Tensor, "n V"], into: list[Tensor] | None
    ) -> Float[Tensor, "n d"]:
        """The derivative by the states; those by ``leaves`` are added to ``into``."""
        out = torch.zeros(slope.shape[0], self.weight.shape[1], dtype=self.dtype, device=slope.device)
        for part, weight in self.slices():
            out.addmm_(slope[:, part], weight, alpha=self.scale)
        if into is not None:
            grads = iter(into)
            if self.weight.requires_grad:
                next(grads).addmm_(slope.t(), self.scaled(states))
            if self.bias is not None and self.bias.requires_grad:
                next(grads).add_(slope.sum(0), alpha=self.scale)
        return out

    def scaled(self, states: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        states = states.to(self.dtype)
        return states if self.scale == 1 else states * self.scale

    def slices(self, columns: int | None = None) -> Iterator[tuple[slice, Float[Tensor, "v d"]]]:
        """The weight in the pass's dtype, ``columns`` tokens of the vocabulary at a time."""
        return widened_slices(self.weight.detach(), self.dtype, columns)


class ModuleHead:
    """A head that is more than a weight, such as one with an adapter. Its forward is called; its weight is not read."""

    def __init__(self, head: HeadSpec, dtype: torch.dtype) -> None:
        self.head, self.dtype = head, torch.promote_types(dtype, torch.float32)
        with torch.enable_grad():
            probe = head.logits(torch.zeros(1, head.weight.shape[1], dtype=dtype, device=head.weight.device))
        self.leaves = _leaves(probe)

    def logits(self, states: Float[Tensor, "n d"], out: Float[Tensor, "n V"]) -> None:
        with torch.no_grad():
            out.copy_(self.head.logits(states))

    def chain(self, z: Float[Tensor, "n V"], slope: Float[Tensor, "n V"]) -> None:
        """Does nothing: autograd handles the scale and the cap."""

    def pull(
        self, states: Float[Tensor, "n d"], slope: Float[Tensor, "n V"], into: list[Tensor] | None
    ) -> Float[Tensor, "n d"]:
        states = states.detach().requires_grad_()
        leaves = self.leaves if into is not None else ()
        with torch.enable_grad():
            z = self.head.logits(states)
        by_states, *by_leaves = torch.autograd.grad(z, [states, *leaves], slope.to(z.dtype))
        for total, grad in zip(into or (), by_leaves, strict=True):
            total += grad
        return by_states.to(self.dtype)


Product = PlainHead | ModuleHead


def _leaves(output: Tensor) -> tuple[Tensor, ...]:
    """The parameters that ``output`` was made from, in the order in which its graph meets them."""
    found: dict[int, Tensor] = {}
    seen: set[object] = set()
    todo: list[object] = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        todo += [after for after, _ in getattr(node, "next_functions", ())]
    return tuple(found.values())

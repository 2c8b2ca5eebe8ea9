"""The low-rank core: y + s·(x Aᵀ) Bᵀ, the one kernel behind LoRA, PiSSA, EVA, DeLoRA, DoRA, HRA, VeRA and AntiPaSTO.

Legend: N tokens (leading dimensions flattened), n inputs, m outputs, k rank.
The adapter's fp32 tensors are cast to the base's dtype inside; what is kept for backward is x in the base's dtype (the
very tensor that q, k and v share; not at all where A is frozen) and h = x Aᵀ [N, k] (not where B is frozen).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Factors:
    """ΔW = scale · B core A, with core the identity, a diagonal [k], or a block diagonal [k/b, b, b]."""

    A: Float[Tensor, "k n"]
    B: Float[Tensor, "m k"]
    scale: float = 1.0
    core: Tensor | None = None

    def dense(self) -> Float[Tensor, "m n"]:
        """ΔW in fp32."""
        return self.scale * (self.left() @ self.A.float())

    def left(self) -> Float[Tensor, "m k"]:
        """B·core in fp32, so that ΔW = scale · left · A."""
        b = self.B.float()
        if self.core is None:
            return b
        if self.core.dim() == 1:
            return b * self.core
        blocks, width = self.core.shape[0], self.core.shape[1]
        return torch.einsum("mgi,gij->mgj", b.view(-1, blocks, width), self.core).reshape(b.shape)

    def cast(self, dtype: torch.dtype) -> Factors:
        core = None if self.core is None else self.core.to(dtype)
        return Factors(self.A.to(dtype), self.B.to(dtype), self.scale, core)


class _LowRank(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, x: Tensor, a: Tensor, b: Tensor, s: float) -> tuple[Tensor, Tensor]:
        h = x @ a.to(x.dtype).t()
        return torch.addmm(y, h, b.to(x.dtype).t(), alpha=s), h

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, x, a, b, ctx.s = inputs
        _, h = output
        ctx.mark_non_differentiable(h)
        ctx.set_materialize_grads(False)
        _, need_x, need_a, need_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if need_a else None, h if need_b else None, a if need_x else None, b if need_a or need_x else None
        )

    @staticmethod
    @once_differentiable  # h is kept as a constant: a second derivative would be wrong, so it raises
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None, None
        x, h, a, b = ctx.saved_tensors
        need_y, need_x, need_a, need_b, _ = ctx.needs_input_grad
        da = db = dx = None
        if need_b:
            db = (g.t() @ h).mul_(ctx.s)
        if need_a or need_x:
            u = (g @ b.to(g.dtype)).mul_(ctx.s)
            da = u.t() @ x if need_a else None
            dx = u @ a.to(g.dtype) if need_x else None
        return g if need_y else None, dx, da, db, None


def _apply_core(h: Float[Tensor, "N k"], core: Tensor) -> Float[Tensor, "N k"]:
    if core.dim() == 1:
        return h * core
    blocks, width = core.shape[0], core.shape[1]
    return torch.einsum("ngj,gij->ngi", h.view(-1, blocks, width), core).reshape(h.shape)


def low_rank(y: Float[Tensor, "*N m"], x: Float[Tensor, "*N n"], f: Factors) -> Float[Tensor, "*N m"]:
    """y + s·core(x Aᵀ) Bᵀ in y's dtype. Neither BA nor s·Δ is ever formed."""
    shape, dtype = y.shape, y.dtype
    y, x = y.reshape(-1, shape[-1]), x.reshape(-1, x.shape[-1])
    if x.dtype != dtype:
        x = x.to(dtype)  # under autocast only
    if f.core is not None:
        # A and B are frozen bases here, so plain autograd keeps h and nothing else.
        h = _apply_core(x @ f.A.to(dtype).t(), f.core.to(dtype))
        return torch.addmm(y, h, f.B.to(dtype).t(), alpha=f.scale).view(shape)
    cast = f.A.dtype != dtype or f.B.dtype != dtype
    if cast and torch.is_grad_enabled() and (f.A.requires_grad or f.B.requires_grad or x.requires_grad):
        out: Tensor = _LowRank.apply(y, x, f.A, f.B, f.scale)[0]
    else:
        # Without a cast autograd keeps the very same two tensors, and a call costs less.
        out = torch.addmm(y, x @ f.A.to(dtype).t(), f.B.to(dtype).t(), alpha=f.scale)
    return out.view(shape)

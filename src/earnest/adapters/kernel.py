"""The low-rank core: y + s·(x Aᵀ) Bᵀ, the kernel of LoRA, PiSSA, EVA, DeLoRA, DoRA, HRA, VeRA and AntiPaSTO.

Legend: N tokens (leading dimensions flattened), n inputs, m outputs, k rank.
The kernel casts the adapter's fp32 tensors to the base's dtype. For backward it keeps x in the base's dtype (the tensor
that q, k and v share; not if A is frozen) and h = x Aᵀ [N, k] (not if B is frozen).
An offset from a frozen start, D (A₀ + δ) + P δ, has rank 2r. `Around` uses that A₀ and P are frozen and that δ occurs
twice, so forward and backward cost 10 products of rank r instead of 12 (a LoRA: 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

SMALL = 2**17
"""Outputs with fewer numbers than this use plain autograd: there the overhead of a custom Function dominates."""


@dataclass(frozen=True)
class Factors:
    """ΔW = scale · diag(gain) B core A; core is the identity, a diagonal [k], or a block diagonal [k/b, b, b].

    With a core or a gain, A and B are frozen bases.
    """

    A: Float[Tensor, "k n"]
    B: Float[Tensor, "m k"]
    scale: float = 1.0
    core: Tensor | None = None
    gain: Float[Tensor, " m"] | None = None

    def dense(self) -> Float[Tensor, "m n"]:
        """ΔW in fp32."""
        return self.scale * (self.left() @ self.A.float())

    def left(self) -> Float[Tensor, "m k"]:
        """diag(gain)·B·core in fp32, so that ΔW = scale · left · A."""
        b = self.B.float() if self.gain is None else self.gain[:, None] * self.B.float()
        if self.core is None:
            return b
        if self.core.dim() == 1:
            return b * self.core
        blocks, width = self.core.shape[0], self.core.shape[1]
        return torch.einsum("mgi,gij->mgj", b.view(-1, blocks, width), self.core).reshape(b.shape)

    def plain(self) -> Factors:
        return self

    def cast(self, dtype: torch.dtype) -> Factors:
        """The factors for sampling: in the base's dtype, with gain and core folded into B (a full basis stays
        shared)."""
        k, most = self.A.shape[0], min(self.A.shape[1], self.B.shape[0])
        if self.core is not None and self.gain is None and 2 * k > most:
            return Factors(self.A.to(dtype), self.B.to(dtype), self.scale, self.core.to(dtype))
        return Factors(self.A.to(dtype), self.left().to(dtype), self.scale)


@dataclass(frozen=True)
class Around:
    """ΔW = scale · strength · (D (A₀ + δ) + P δ), with A₀ and P frozen: an update around a frozen start, of rank 2r."""

    start: Float[Tensor, "r n"]  # A₀
    delta: Float[Tensor, "r n"]  # δ
    left: Float[Tensor, "m r"]  # D
    frozen: Float[Tensor, "m r"]  # P
    scale: float = 1.0
    strength: Float[Tensor, 1] | None = None

    def plain(self) -> Factors:
        """This ΔW as one pair of factors."""
        b = torch.cat([self.left, self.frozen], 1)
        b = b if self.strength is None else b * self.strength
        return Factors(torch.cat([self.start + self.delta, self.delta]), b, self.scale)


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
    @once_differentiable  # h is a saved constant: a second derivative would be wrong, so it raises
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None, None
        x, h, a, b = ctx.saved_tensors
        need_y, need_x, need_a, need_b, _ = ctx.needs_input_grad
        da = db = dx = None
        if need_b:
            db = (h.t() @ g).t().mul_(ctx.s)
        if need_a or need_x:
            u = (g @ b.to(g.dtype)).mul_(ctx.s)
            da = u.t() @ x if need_a else None
            dx = u @ a.to(g.dtype) if need_x else None
        return g if need_y else None, dx, da, db, None


TINY = 1e-12


def _beside(left: Tensor, frozen: Tensor, strength: Tensor | None, dtype: torch.dtype) -> Tensor:
    """strength · [D, P], multiplied before the cast: in bf16 a strength near 1 would lose its small changes."""
    both = torch.cat([left, frozen], 1)
    return (both if strength is None else both * strength).to(dtype)


class _Around(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        y: Tensor,
        x: Tensor,
        start: Tensor,
        delta: Tensor,
        left: Tensor,
        frozen: Tensor,
        strength: Tensor | None,
        s: float,
    ) -> tuple[Tensor, Tensor]:
        h = x @ torch.cat([start + delta, delta]).to(x.dtype).t()
        return torch.addmm(y, h, _beside(left, frozen, strength, x.dtype).t(), alpha=s), h

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, x, start, delta, left, frozen, strength, ctx.s = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        _, _, _, need_delta, need_left, _, need_strength, _ = ctx.needs_input_grad
        h = output[1] if need_left or need_strength else None
        ctx.save_for_backward(x if need_delta else None, h, start, delta, left, frozen, strength)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 8
        x, h, start, delta, left, frozen, strength = ctx.saved_tensors
        need_y, need_x, _, need_delta, need_left, _, need_strength, _ = ctx.needs_input_grad
        r = delta.shape[0]
        u = (g @ _beside(left, frozen, strength, g.dtype)).mul_(ctx.s)
        d_left = d_strength = None
        if need_strength:  # u already contains the strength
            away = torch.where(strength.abs() < TINY, torch.full_like(strength, TINY), strength)
            d_strength = (u.float() * h.float()).sum() / away if u.dtype.itemsize < 4 else (u * h).sum() / away
        if need_left:
            d_left = (h[:, :r].t() @ g).t().mul_(ctx.s)  # gᵀ h takes 1.5 times as long
            d_left = d_left if strength is None else d_left.to(strength.dtype) * strength
        d_delta = (u[:, :r] + u[:, r:]).t() @ x if need_delta else None
        dx = u @ torch.cat([start + delta, delta]).to(g.dtype) if need_x else None
        return g if need_y else None, dx, None, d_delta, d_left, None, d_strength, None


def _apply_core(h: Float[Tensor, "N k"], core: Tensor) -> Float[Tensor, "N k"]:
    if core.dim() == 1:
        return h * core
    blocks, width = core.shape[0], core.shape[1]
    return torch.einsum("ngj,gij->ngi", h.view(-1, blocks, width), core).reshape(h.shape)


def low_rank(y: Float[Tensor, "*N m"], x: Float[Tensor, "*N n"], f: Factors | Around) -> Float[Tensor, "*N m"]:
    """y + ΔW x in y's dtype; ΔW is never formed."""
    shape, dtype = y.shape, y.dtype
    y, x = y.reshape(-1, shape[-1]), x.reshape(-1, x.shape[-1])
    if x.dtype != dtype:
        x = x.to(dtype)  # under autocast only
    return (_around(y, x, f) if isinstance(f, Around) else _factored(y, x, f)).view(shape)


def _factored(y: Float[Tensor, "N m"], x: Float[Tensor, "N n"], f: Factors) -> Float[Tensor, "N m"]:
    dtype = y.dtype
    if f.core is not None or f.gain is not None:
        # A and B are frozen bases here, so plain autograd keeps only h (and B h, with a gain).
        h = x @ f.A.to(dtype).t()
        h = h if f.core is None else _apply_core(h, f.core.to(dtype))
        if f.gain is None:
            return torch.addmm(y, h, f.B.to(dtype).t(), alpha=f.scale)
        return torch.addcmul(y, h @ f.B.to(dtype).t(), f.gain.to(dtype), value=f.scale)
    cast = f.A.dtype != dtype or f.B.dtype != dtype
    if cast and torch.is_grad_enabled() and (f.A.requires_grad or f.B.requires_grad or x.requires_grad):
        return _LowRank.apply(y, x, f.A, f.B, f.scale)[0]
    # Without a cast, autograd keeps the same two tensors, and a call costs less.
    return torch.addmm(y, x @ f.A.to(dtype).t(), f.B.to(dtype).t(), alpha=f.scale)


def _around(y: Float[Tensor, "N m"], x: Float[Tensor, "N n"], f: Around) -> Float[Tensor, "N m"]:
    if torch.is_grad_enabled():
        if y.numel() < SMALL:
            return _factored(y, x, f.plain())
        return _Around.apply(y, x, f.start, f.delta, f.left, f.frozen, f.strength, f.scale)[0]
    if f.strength is not None:
        return _factored(y, x, f.plain())
    dtype = y.dtype
    second = x @ f.delta.to(dtype).t()
    first = torch.addmm(second, x, f.start.to(dtype).t())
    return torch.addmm(
        torch.addmm(y, first, f.left.to(dtype).t(), alpha=f.scale), second, f.frozen.to(dtype).t(), alpha=f.scale
    )

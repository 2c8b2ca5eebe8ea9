"""The elementwise core: y + e ∘ y (IA3, DoRA) and y + e₁ ∘ y + e₂ ∘ rotate_half(y) (RoAd), with e = 0 the identity.

Legend: N tokens (leading dimensions flattened), m outputs, G groups of 2·h outputs.
Only y is kept for backward; the gradient of y is one pass over g.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from earnest.adapters import kernel


class _Gained(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, e: Tensor) -> Tensor:
        return torch.addcmul(y, y, e)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        y, e = inputs
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, e = ctx.saved_tensors
        need_y, need_e = ctx.needs_input_grad
        return (
            torch.addcmul(g, g, e) if need_y else None,
            (g * y).reshape(-1, e.shape[0]).sum(0) if need_e else None,
        )


def gained(y: Float[Tensor, "*N m"], e: Float[Tensor, " m"]) -> Float[Tensor, "*N m"]:
    """y + e ∘ y, in y's dtype. In bf16, 1 + e would round a small e away; in fp32 and wider (1 + e) ∘ y is exact
    enough."""
    if y.dtype.itemsize >= 4:
        return y * (1 + e.to(y.dtype))
    e = e.to(y.dtype)
    if y.numel() < kernel.SMALL or not torch.is_grad_enabled():
        return torch.addcmul(y, y, e)
    return _Gained.apply(y, e)


class _Turned(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, e1: Tensor, e2: Tensor) -> Tensor:
        return _turn(y, e1, e2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        y, e1, e2 = inputs
        ctx.save_for_backward(y if any(ctx.needs_input_grad[1:]) else None, e1, e2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        y, e1, e2 = ctx.saved_tensors
        need_y, need_1, need_2 = ctx.needs_input_grad
        # rotate_halfᵀ (e₂ ∘ g): the transpose exchanges the halves and their signs
        dy = _turn(g, e1, -e2.flip(1) if e2.shape[1] == 2 else -e2) if need_y else None
        d1 = (g * y).sum(0).sum_to_size(e1.shape) if need_1 else None
        d2 = torch.stack([-(g[:, :, 0] * y[:, :, 1]).sum(0), (g[:, :, 1] * y[:, :, 0]).sum(0)], 1) if need_2 else None
        return dy, d1, None if d2 is None else d2.sum_to_size(e2.shape)


def _turn(y: Float[Tensor, "N G 2 h"], e1: Float[Tensor, "G p h"], e2: Float[Tensor, "G p h"]) -> Tensor:
    out = torch.addcmul(y, y, e1)
    out[:, :, 0].addcmul_(y[:, :, 1], e2[:, 0], value=-1)
    out[:, :, 1].addcmul_(y[:, :, 0], e2[:, -1])
    return out


def turned(y: Float[Tensor, "*N m"], e1: Float[Tensor, "G p h"], e2: Float[Tensor, "G p h"]) -> Float[Tensor, "*N m"]:
    """y + e₁ ∘ y + e₂ ∘ rotate_half(y) in groups of two halves; p = 1 if both halves share e₁ and e₂, otherwise 2."""
    pairs = y.reshape(-1, e1.shape[0], 2, e1.shape[-1])
    e1, e2 = e1.to(y.dtype), e2.to(y.dtype)
    if not torch.is_grad_enabled():
        out = _turn(pairs, e1, e2)
    elif y.numel() < kernel.SMALL:
        rotated = torch.stack((-pairs[:, :, 1], pairs[:, :, 0]), 2)
        out = torch.addcmul(torch.addcmul(pairs, pairs, e1), rotated, e2)
    else:
        out = _Turned.apply(pairs, e1, e2)
    return out.reshape(y.shape)

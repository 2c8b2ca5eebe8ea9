"""A base whose linear layers are stored in 8 or 4 bits and computed in the model's own dtype (QLoRA, arXiv 2305.14314).

    int8   W[i, j] ≈ scale[i] · code[i, j],          code in -127 … 127, one scale per output
    nf4    W[k]    ≈ scale[k // 64] · table[code[k]]  16 levels at the quantiles of a normal distribution, one scale per
           64 weights (without the paper's second quantisation, of the scales)

The backward pass dequantises the weight again, so no dense copy is kept. Embeddings, norms and the head are not
quantised, and neither are experts that are stored as one 3-D parameter.
Shapes: m outputs, n inputs, k weights, b blocks of 64.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Kind = Literal["int8", "nf4"]
KINDS: tuple[str, ...] = get_args(Kind)
BLOCK = 64
# bitsandbytes' table of NF4, create_normal_map
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class QuantisedLinear(nn.Module):
    """The map x Wᵀ + b of ``linear`` with a quantised W. ``compute_dtype`` is the dtype of inputs and outputs."""

    codes: Tensor
    scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.compute_dtype = linear.weight.dtype
        codes, scale = (_to_int8 if kind == "int8" else _to_nf4)(linear.weight.detach().float())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_parameter("bias", linear.bias)

    @property
    def numel(self) -> int:
        """The number of weights."""
        return self.in_features * self.out_features

    def dequantised(self) -> Float[Tensor, "m n"]:
        """The dequantised W with which the layer computes."""
        return _dequantised(self.codes, self.scale, (self.out_features, self.in_features), self.compute_dtype)

    def forward(self, input: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        shape = (self.out_features, self.in_features)
        return _Product.apply(input, self.codes, self.scale, self.bias, shape)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}, computes in {self.compute_dtype}"


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        return nn.functional.linear(x, _dequantised(codes, scale, shape, x.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, scale, _, ctx.shape = inputs
        ctx.save_for_backward(codes, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        by_bias = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return g @ _dequantised(codes, scale, ctx.shape, g.dtype), None, None, by_bias, None


def _to_int8(weight: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (weight / scale).round().to(torch.int8), scale


def _to_nf4(weight: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor]:
    """Two codes per byte, the first in the high bits; the last block is padded with zeros."""
    flat = nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1, keepdim=True)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = torch.bucketize(flat / scale, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten()
    return codes[::2] * 16 + codes[1::2], scale


def _dequantised(codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Float[Tensor, "m n"]:
    if codes.dtype == torch.int8:
        return (codes * scale).to(dtype)
    levels = torch.tensor(LEVELS, device=codes.device)
    both = torch.stack([codes >> 4, codes & 15], 1)
    flat = (levels[both.long()].view(-1, BLOCK) * scale).to(dtype).flatten()
    return flat[: shape[0] * shape[1]].view(shape)


def quantise(model: nn.Module, kind: Kind) -> str:
    """Replace every linear layer but the head, in place; returns a note with the bytes before and after."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    before = stored_bytes(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, QuantisedLinear(module, kind))
    return f"linear layers in {kind}: {before / 1e6:,.1f} MB became {stored_bytes(model) / 1e6:,.1f} MB"


def stored_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; shared ones count once."""
    return sum({id(t): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}.values())


def count_parameters(model: nn.Module) -> int:
    """Weights of the model, quantised or not; tied ones count once."""
    packed = sum(m.numel for m in model.modules() if isinstance(m, QuantisedLinear))
    return packed + sum(p.numel() for p in model.parameters())

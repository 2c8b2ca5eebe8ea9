"""IA3, arXiv 2205.05638:  y = (1 + δ) ∘ (W x + b)  on keys and values.
IA3-FF:  y = W ((1 + δ) ∘ x) + b  on the second matrix of the FFN.

δ = 0 at initialization. δ is stored in fp32, so small steps are not rounded away, and weight decay moves the layer
toward the base instead of toward zero. The bias is scaled too, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.gains import gained
from earnest.adapters.layer import Layer
from earnest.adapters.variant import Spec, Tensors, Variant, WeightAndBias, register


@dataclass(frozen=True)
class _Gains(Variant):
    """A gain 1 + δ for each output (``dim`` 0 of the weight [m, n]) or each input (``dim`` 1)."""

    paper = "2205.05638"
    lr = 5e-3
    peft_type = "IA3"
    peft_names: ClassVar = {"d": "ia3_l"}
    dim: ClassVar[int]

    def specs(self, layer: Layer) -> dict[str, Spec]:
        return {"d": Spec(((layer.m, layer.n)[self.dim],))}

    def _gained(self, t: Tensors, values: Tensor, scale: float) -> Tensor:
        return gained(values, t["d"] if scale == 1.0 else scale * t["d"])

    def linear(self) -> bool:
        return True

    def peft_config(self) -> dict[str, Any] | None:
        return {"feedforward_modules": [], "feedforward": self.dim == 1}

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"ia3_l": (1 + t["d"]).unsqueeze(1 - self.dim)}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        """By PEFT's rule: a target in feedforward_modules scales its input."""
        targets, ff = config.get("target_modules"), config.get("feedforward_modules") or []
        targets = {targets} if isinstance(targets, str) else set(targets or ())
        ff = {ff} if isinstance(ff, str) else set(ff)
        if targets & ff and not targets <= ff:
            raise AdapterError(
                "this PEFT IA3 adapter mixes feedforward and other modules; save the two groups as two adapters."
            )
        return cls() if (targets <= ff) == (cls.dim == 1) else None

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        return {"d": tensors["ia3_l"].squeeze(1 - self.dim) - 1}


@register
@dataclass(frozen=True)
class IA3(_Gains):
    """One learned gain for each output."""

    name = "ia3"
    reference = "peft IA3Config"
    equation = "y = (1 + δ) ∘ (Wx + b)"
    lr_source = "PEFT's MetaMathQA comparison (45.5 % at 5e-3, 31.1 % at 1e-4)"
    targets = ("keys_values",)
    dim = 0

    def after(self, t: Tensors, y: Tensor, layer: Layer, scale: float) -> Tensor:
        return self._gained(t, y, scale)

    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        gain = 1 + scale * t["d"]
        return w * gain[:, None], None if b is None else b * gain


@register
@dataclass(frozen=True)
class IA3FF(_Gains):
    """One learned gain for each input."""

    name = "ia3_ff"
    reference = "peft IA3Config(feedforward_modules=…)"
    equation = "y = W ((1 + δ) ∘ x) + b"
    lr_source = "as IA3"
    targets = ("ffn_in",)
    dim = 1

    def before(self, t: Tensors, x: Tensor, layer: Layer, scale: float) -> Tensor:
        return self._gained(t, x, scale)

    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        return w * (1 + scale * t["d"]), b

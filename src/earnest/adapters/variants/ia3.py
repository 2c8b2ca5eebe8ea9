"""IA3, arXiv 2205.05638:  y = (1 + δ) ∘ (W x + b)  on keys and values.
IA3-FF:  y = W ((1 + δ) ∘ x) + b  on the second matrix of the FFN.

δ = 0 at initialization. δ is stored in fp32, so small steps are not rounded away, and weight decay moves the layer
toward the base instead of toward zero. The bias is scaled too, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.gains import gained
from earnest.adapters.layer import Layer
from earnest.adapters.variant import Spec, Tensors, Variant, register


def _peft_kind(config: Mapping[str, Any]) -> str | None:
    """ "ff", "out" or None, by PEFT's rule: a target in feedforward_modules scales its input."""
    if config.get("peft_type") != "IA3":
        return None
    targets, ff = config.get("target_modules"), config.get("feedforward_modules") or []
    targets = {targets} if isinstance(targets, str) else set(targets or ())
    ff = {ff} if isinstance(ff, str) else set(ff)
    if targets & ff and not targets <= ff:
        raise AdapterError(
            "this PEFT IA3 adapter mixes feedforward and other modules; save the two groups as two adapters."
        )
    return "ff" if targets <= ff else "out"


@register
@dataclass(frozen=True)
class IA3(Variant):
    """One learned gain for each output."""

    name = "ia3"
    paper = "2205.05638"
    reference = "peft IA3Config"
    equation = "y = (1 + δ) ∘ (Wx + b)"
    lr = 5e-3
    lr_source = "PEFT's MetaMathQA comparison (45.5 % at 5e-3, 31.1 % at 1e-4)"
    targets = ("keys_values",)

    def specs(self, layer: Layer) -> dict[str, Spec]:
        return {"d": Spec((layer.m,))}

    def after(self, t: Tensors, y: Tensor, layer: Layer, scale: float) -> Tensor:
        return gained(y, t["d"] if scale == 1.0 else scale * t["d"])

    def weight(
        self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        gain = 1 + scale * t["d"]
        return w * gain[:, None], None if b is None else b * gain

    def linear(self) -> bool:
        return True

    def peft_config(self) -> dict[str, Any] | None:
        return {"peft_type": "IA3", "feedforward_modules": [], "feedforward": False}

    def peft_suffixes(self) -> Sequence[str]:
        return ("ia3_l",)

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"ia3_l": (1 + t["d"])[:, None]}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        return IA3() if _peft_kind(config) == "out" else None

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        return {"d": tensors["ia3_l"].squeeze(1) - 1}


@register
@dataclass(frozen=True)
class IA3FF(Variant):
    """One learned gain for each input."""

    name = "ia3_ff"
    paper = "2205.05638"
    reference = "peft IA3Config(feedforward_modules=…)"
    equation = "y = W ((1 + δ) ∘ x) + b"
    lr = 5e-3
    lr_source = "as IA3"
    targets = ("ffn_in",)

    def specs(self, layer: Layer) -> dict[str, Spec]:
        return {"d": Spec((layer.n,))}

    def before(self, t: Tensors, x: Tensor, layer: Layer, scale: float) -> Tensor:
        return gained(x, t["d"] if scale == 1.0 else scale * t["d"])

    def weight(
        self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        return w * (1 + scale * t["d"]), b

    def linear(self) -> bool:
        return True

    def peft_config(self) -> dict[str, Any] | None:
        return {"peft_type": "IA3", "feedforward": True}

    def peft_suffixes(self) -> Sequence[str]:
        return ("ia3_l",)

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"ia3_l": (1 + t["d"])[None]}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        return IA3FF() if _peft_kind(config) == "ff" else None

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        return {"d": tensors["ia3_l"].squeeze(0) - 1}

"""DoRA, arXiv 2402.09353:  y = g ∘ (W x + s·B A x) + b,  g = (1 + δ)·‖W‖/‖V‖,  V = W + s·B A,  ‖·‖ over rows, detached.

The magnitude m = ‖W‖(1 + δ) is stored as δ = 0, so g = 1 exactly at initialization. The norm is factored
(arXiv 2603.22276):

    ‖V_i‖² = ‖w_i‖² + 2s (W Aᵀ ∘ B)_i·1 + s² (B (A Aᵀ) ∘ B)_i·1,

with W Aᵀ computed as r extra tokens through the base's kernel, and cached until A or B changes. g − 1 is computed
directly, without cancellation. With several adapters on a layer, W is the base weight. The gate scales s and δ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.gains import gained
from earnest.adapters.layer import Layer
from earnest.adapters.runtime import cached
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, WeightAndBias, register
from earnest.adapters.variants.lora import LoRA


@register
@dataclass(frozen=True)
class DoRA(LoRA):
    """LoRA on the direction, a gain on the magnitude."""

    name = "dora"
    experts = Variant.experts  # no form for them
    paper = "2402.09353"
    reference = "peft LoraConfig(use_dora=True)"
    equation = "y = g∘(Wx + s·B A x) + b,  g = (1+δ)‖W‖/‖W + s·BA‖"
    lr = 1e-4
    lr_source = "PEFT's MetaMathQA comparison (46.9 % at 1e-4, r = 32)"
    detached = "the norm ‖V‖ (section 4.3 of the paper)"
    peft_names: ClassVar = LoRA.peft_names | {"dm": "lora_magnitude_vector"}
    examples: ClassVar = {"dora": {"rank": 4}}

    def specs(self, layer: Layer) -> dict[str, Spec]:
        return super().specs(layer) | {"dm": Spec((layer.m,)), "w2": Spec((layer.m,), trainable=False)}

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        return super().initial(layer, ctx) | {"w2": layer.weight().square().sum(1)}

    def _log_ratio(self, t: Tensors, layer: Layer, scale: float) -> Float[Tensor, " m"]:
        """log(‖W‖/‖V‖), exactly 0 where B = 0; no gradient (section 4.3 of the paper)."""

        def compute() -> Tensor:
            a, b, s = t["A"].detach(), t["B"].detach(), self.s * scale
            cross = (layer.rows(a).float().t() * b).sum(1)
            square = ((b @ (a @ a.t())) * b).sum(1)
            change = (2 * s * cross + s * s * square) / t["w2"].clamp_min(1e-30)
            return -0.5 * torch.log1p(change.clamp_min(-1 + 1e-6))

        with torch.no_grad():
            return cached(layer, "dora", {"A": t["A"], "B": t["B"], "w2": t["w2"]}, scale, compute)

    def gain_minus_one(self, t: Tensors, layer: Layer, scale: float) -> Float[Tensor, " m"]:
        """g − 1 in fp32."""
        log = self._log_ratio(t, layer, scale)
        return scale * t["dm"] * log.exp() + torch.expm1(log)

    def after(self, t: Tensors, y: Tensor, layer: Layer, scale: float) -> Tensor:
        e, bias = self.gain_minus_one(t, layer, scale), layer.bias
        scaled = gained(y, e)
        return scaled if bias is None else scaled - (e * bias).to(y.dtype)

    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        e = self.gain_minus_one(t, layer, scale)
        new = (1 + e)[:, None] * (w + self.factors(t, layer, scale).dense())
        if b is None:
            return new, None
        assert layer.bias is not None
        return new, b + e * (b - layer.bias.float())

    def linear(self) -> bool:
        return False

    def linear_note(self) -> str:
        return "its gain divides by the norm of W + s·BA"

    def peft_config(self) -> dict[str, Any] | None:
        base = super().peft_config()
        assert base is not None
        return base | {"use_dora": True}

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return super().to_peft(t, layer) | {"lora_magnitude_vector": t["w2"].sqrt() * (1 + t["dm"])}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        plain = LoRA.from_peft_config({**config, "use_dora": False}) if config.get("use_dora") else None
        return DoRA(plain.rank, plain.alpha, plain.rslora) if isinstance(plain, LoRA) else None

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        w2 = layer.weight().square().sum(1)
        dm = tensors["lora_magnitude_vector"] / w2.sqrt().clamp_min(1e-30) - 1
        return super().from_peft(layer, tensors, shared) | {"w2": w2, "dm": dm}

"""PiSSA, arXiv 2404.02948:  y = W x + b + s·(B A − B₀ A₀) x,  W = U Σ Vᵀ,  B₀ = U_r √(Σ_r/s),  A₀ = √(Σ_r/s) V_rᵀ.

The paper writes W − s·B₀A₀ over the base weight; here W stays, and δA = A − A₀, δB = B − B₀ are trained around frozen
copies:

    B A − B₀ A₀ = δB A + B₀ δA,

a LoRA of rank 2r that is exactly 0 at δ = 0 in every dtype, without large terms that cancel. δA and δB both have a
gradient at step 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from earnest.adapters.kernel import Around
from earnest.adapters.layer import Layer
from earnest.adapters.linalg import top_svd
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, register
from earnest.settings import setting


@register
@dataclass(frozen=True)
class PiSSA(Variant):
    """LoRA started at the principal singular directions, as an offset from them."""

    rank: int = setting(8, "r, the rank of the update", at_least=1)
    alpha: float | None = setting(
        None, "α: the update is multiplied by s = α/r; none: s = 1, as in the paper", above=0.0
    )
    niter: int = setting(0, "iterations of a randomised SVD; 0: the exact SVD", at_least=0)

    name = "pissa"
    paper = "2404.02948"
    reference = 'peft LoraConfig(init_lora_weights="pissa")'
    equation = "y = Wx + b + s·(B A − B₀ A₀) x"
    lr = 1e-5
    lr_source = "a tenth of LoRA's: its sharpest direction is about ten times as curved, arXiv 2602.04998"
    cheap = True
    peft_type = "LORA"
    peft_names: ClassVar = {"dA": "lora_A.weight", "dB": "lora_B.weight"}
    examples: ClassVar = {"pissa": {"rank": 4}, "pissa (α, fast)": {"rank": 4, "alpha": 8.0, "niter": 3}}

    @property
    def s(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self, layer: Layer) -> None:
        layer.check_rank(self.name, self.rank)

    def specs(self, layer: Layer) -> dict[str, Spec]:
        a, b = (self.rank, layer.n), (layer.m, self.rank)
        return {"dA": Spec(a), "dB": Spec(b), "A0": Spec(a, trainable=False), "B0": Spec(b, trainable=False)}

    def principal(self, layer: Layer, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        u, sigma, vh = top_svd(layer.weight(), self.rank, self.niter, rng)
        root = (sigma / self.s).sqrt()
        return root[:, None] * vh, u * root

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        a0, b0 = self.principal(layer, ctx.rng)
        return {"A0": a0, "B0": b0}

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Around:
        return Around(t["A0"], t["dA"], t["dB"], t["B0"], self.s * scale)

    def portable_rank(self, layer: Layer) -> int | None:
        return 2 * self.rank

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        if config.get("init_lora_weights") != "pissa" or config.get("use_dora"):
            return None  # pissa_niter_k: the file does not record which random SVD was subtracted
        r, alpha = int(config["r"]), float(config["lora_alpha"])
        return PiSSA(r, alpha * math.sqrt(r) if config.get("use_rslora") else alpha)

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        # B₀A₀ is the truncated W for any signs of the singular vectors, so ΔW is exact.
        a0, b0 = self.principal(layer, torch.Generator().manual_seed(0))
        return {"A0": a0, "B0": b0, "dA": tensors["lora_A.weight"] - a0, "dB": tensors["lora_B.weight"] - b0}

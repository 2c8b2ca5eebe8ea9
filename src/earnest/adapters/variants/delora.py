"""DeLoRA, arXiv 2503.18225:  ΔW = (λ/r)·[N(A, B) − N(A₀, B₀)],  N(A, B) = B diag(1/(‖a_i‖‖b_i‖)) A diag(‖W_:j‖).

``init="frozen_copy"`` is the paper's: a copy of the random start is subtracted, so ΔW = 0 and the first step is
small. Written as (B̂ − B̂₀) Â + B̂₀ (Â − Â₀) it is exactly 0 at initialization. Both terms share the strength λ, which
has no gradient at step 1. ``init="zero"`` is PEFT's: B = 0, norms clamped at 1e-4. Its first step is ‖ΔW‖/‖W‖ ≈
λ/√(r n) at any learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from earnest.adapters.kernel import Around, Factors
from earnest.adapters.layer import Layer
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, register
from earnest.adapters.variants.lora import check_fits, kaiming
from earnest.settings import setting

EPS = 1e-4  # PEFT's clamp of the norms


def _unit(a: Tensor, b: Tensor) -> Tensor:
    """B with column i divided by ‖a_i‖‖b_i‖."""
    return b / (a.norm(dim=1).clamp_min(EPS) * b.norm(dim=0).clamp_min(EPS))


@register
@dataclass(frozen=True)
class DeLoRA(Variant):
    """Low-rank update with its angle and its strength decoupled."""

    rank: int = setting(8, "r, the rank of the update", at_least=1)
    lam: float = setting(8.0, "λ at initialization: the strength of the update", above=0.0)
    init: str = setting(
        "frozen_copy",
        "subtract a frozen copy of the random start, as in the paper, or start from B = 0, as PEFT does",
        choices=("frozen_copy", "zero"),
    )

    name = "delora"
    paper = "2503.18225"
    reference = 'peft DeloraConfig (init="zero")'
    equation = "y = Wx + b + (λ/r)·[N(A,B) − N(A₀,B₀)] x,  N = B diag(1/‖a‖‖b‖) A diag(‖W_:j‖)"
    lr = 1e-2
    lr_source = "arXiv 2503.18225 (1e-2 and λ₀ = 8 for language models)"
    peft_type = "DELORA"
    peft_names: ClassVar = {"A": "delora_A", "B": "delora_B", "lam": "delora_lambda", "w_norm": "delora_w_norm"}
    examples: ClassVar = {"delora": {"rank": 4}, "delora (zero)": {"rank": 4, "init": "zero"}}

    @property
    def copies(self) -> bool:
        return self.init == "frozen_copy"

    def check(self, layer: Layer) -> None:
        check_fits(self.rank, self.name, layer)

    def specs(self, layer: Layer) -> dict[str, Spec]:
        a, b = (self.rank, layer.n), (layer.m, self.rank)
        norm = Spec((layer.n,), trainable=False)
        if not self.copies:
            return {"A": Spec(a), "B": Spec(b), "lam": Spec((1,)), "w_norm": norm}
        frozen = {"A0": Spec(a, trainable=False), "B0": Spec(b, trainable=False), "w_norm": norm}
        return {"dA": Spec(a), "dB": Spec(b), "dlam": Spec((1,))} | frozen

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        norm = layer.weight().norm(dim=0)
        a = kaiming((self.rank, layer.n), ctx.rng)
        if not self.copies:
            return {"A": a, "lam": torch.tensor([self.lam]), "w_norm": norm}
        return {"A0": a, "B0": kaiming((layer.m, self.rank), ctx.rng), "w_norm": norm}

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Factors | Around:
        if not self.copies:
            return Factors(t["A"] * t["w_norm"], _unit(t["A"], t["B"]) * (t["lam"] / self.rank), scale)
        a, b = t["A0"] + t["dA"], t["B0"] + t["dB"]
        with torch.no_grad():
            start = _unit(t["A0"], t["B0"])
        w, strength = t["w_norm"], (self.lam + t["dlam"]) / self.rank
        return Around(t["A0"] * w, t["dA"] * w, _unit(a, b) - start, start, scale, strength)

    def inactive(self) -> frozenset[str]:
        return frozenset({"dlam"}) if self.copies else frozenset({"A", "lam"})

    def no_decay(self) -> frozenset[str]:
        return frozenset() if self.copies else frozenset({"A", "B"})  # only their directions matter

    def portable_rank(self, layer: Layer) -> int | None:
        return 2 * self.rank if self.copies else self.rank

    def peft_config(self) -> dict[str, Any] | None:
        return None if self.copies else {"r": self.rank, "delora_lambda": self.lam, "bias": "none"}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        return DeLoRA(int(config["r"]), float(config["delora_lambda"]), "zero")

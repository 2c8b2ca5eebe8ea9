"""VeRA, arXiv 2310.11454:  y = W x + b + λ_b ∘ B (λ_d ∘ A x),  A and B random, frozen, and shared by all layers.

λ_b = 0 at initialization; λ_d = d₀ + δ. At step 1 only λ_b has a gradient. A layer uses the top-left corners A[:, :n]
and B[:m].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.kernel import Factors
from earnest.adapters.layer import Layer
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, register
from earnest.adapters.variants.lora import kaiming
from earnest.settings import setting


@register
@dataclass(frozen=True)
class VeRA(Variant):
    """Two gain vectors around one frozen random pair of matrices."""

    rank: int = setting(256, "r, the rank of the shared random matrices", at_least=1)
    d_initial: float = setting(0.1, "d₀: every λ_d at initialization; not 0")
    freeze_d: bool = setting(False, "train λ_b alone, so that ΔW is linear in the trained tensor")

    name = "vera"
    paper = "2310.11454"
    reference = "peft VeraConfig"
    equation = "y = Wx + b + λ_b∘B(λ_d∘A x)"
    lr = 1e-3
    lr_source = "PEFT's MetaMathQA comparison (35.4 % at 1e-3, r = 256)"
    peft_type = "VERA"
    peft_names: ClassVar = {"lb": "vera_lambda_b", "dld": "vera_lambda_d"}
    examples: ClassVar = {"vera": {"rank": 16}, "vera (λ_b)": {"rank": 16, "freeze_d": True}}
    shared = frozenset({"A", "B"})

    def validate(self) -> None:
        if self.d_initial == 0:
            raise AdapterError("vera: d_initial = 0 would leave λ_b without a gradient; PEFT's value is 0.1.")

    def specs(self, layer: Layer) -> dict[str, Spec]:
        a, b = Spec((self.rank, layer.n), trainable=False), Spec((layer.m, self.rank), trainable=False)
        return {"lb": Spec((layer.m,))} | ({} if self.freeze_d else {"dld": Spec((self.rank,))}) | {"A": a, "B": b}

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        m, n = ctx.widest
        root = math.sqrt(6)  # He's uniform bound √(6/fan_in)
        a = root * kaiming((self.rank, n), ctx.shared_rng)
        b = root * kaiming((m, self.rank), ctx.shared_rng)
        return {"A": a[:, : layer.n], "B": b[: layer.m]}

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Factors:
        return Factors(t["A"], t["B"], scale, self._d(t), t["lb"])

    def _d(self, t: Tensors) -> Tensor:
        """λ_d, [r]; without a trained δ it is constant."""
        return self.d_initial + t["dld"] if "dld" in t else t["A"].new_full((self.rank,), self.d_initial)

    def inactive(self) -> frozenset[str]:
        return frozenset() if self.freeze_d else frozenset({"dld"})

    def linear(self) -> bool:
        return self.freeze_d

    def linear_note(self) -> str:
        return "λ_b and λ_d multiply each other"

    def peft_config(self) -> dict[str, Any] | None:
        return {
            "r": self.rank,
            "d_initial": self.d_initial,
            "projection_prng_key": 0,
            "save_projection": True,
            "vera_dropout": 0.0,
            "bias": "none",
        }

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"vera_lambda_b": t["lb"], "vera_lambda_d": self._d(t)}

    def shared_to_peft(self, shared: Tensors) -> dict[str, Tensor]:
        return {"vera_A": shared["A"], "vera_B": shared["B"]}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        if not config.get("save_projection", True):
            raise AdapterError(
                "this VeRA file holds no projections, only a seed of PEFT's; save it with save_projection=True."
            )
        return VeRA(int(config["r"]), float(config.get("d_initial", 0.1)))

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        if missing := {"vera_A", "vera_B"} - set(shared):
            raise AdapterError(f"base_model.{min(missing)} is missing from this VeRA file; save it again with PEFT.")
        a, b = shared["vera_A"][:, : layer.n], shared["vera_B"][: layer.m]
        dld = tensors["vera_lambda_d"] - self.d_initial
        return {"lb": tensors["vera_lambda_b"], "dld": dld, "A": a.contiguous(), "B": b.contiguous()}

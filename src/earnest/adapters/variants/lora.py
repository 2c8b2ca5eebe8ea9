"""LoRA, arXiv 2106.09685:  y = W x + b + s·B A x,  s = α/r  (rsLoRA, arXiv 2312.03732: s = α/√r).

Initialization: A ~ U(±1/√n), B = 0, so ΔW = 0 exactly. At step 1 only B has a gradient.
The experts of a mixture have an A and a B each: W'[e] = W[e] + s·B[e] A[e]. W' is formed when the module reads its
parameter, for all experts at once, so it works with every kernel for experts, and costs one copy of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.kernel import Factors
from earnest.adapters.layer import ExpertsLayer, Layer
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, register
from earnest.settings import setting


def kaiming(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """U(±1/√fan_in), fan_in = the last dimension: PyTorch's default for a linear weight (kaiming with a = √5)."""
    return (torch.rand(shape, generator=rng) * 2 - 1) / math.sqrt(shape[-1])


def check_fits(rank: int, name: str, layer: Layer) -> None:
    """Refuse a rank above both sides of a layer. A rank between them is wasteful, but usual for narrow keys."""
    most = max(layer.m, layer.n)
    if rank > most:
        raise AdapterError(f"{name}: rank {rank} exceeds {layer.name}'s {most}; choose rank ≤ {most}")


@register
@dataclass(frozen=True)
class LoRA(Variant):
    """Low-rank update B A of a frozen weight."""

    rank: int = setting(8, "r, the rank of the update", at_least=1)
    alpha: float = setting(16.0, "α: the update is multiplied by s = α/r", above=0.0)
    rslora: bool = setting(False, "s = α/√r instead of α/r (rsLoRA)")
    freeze_a: bool = setting(False, "train B alone (LoRA-FA, arXiv 2308.03303): ΔW is linear in the trained tensor")

    name = "lora"
    paper = "2106.09685"
    reference = "peft LoraConfig"
    equation = "y = Wx + b + (α/r)·B A x"
    lr = 1e-4
    lr_source = "PEFT's MetaMathQA comparison (47.8 % at 1e-4, r = 32)"
    cheap = True
    peft_type = "LORA"
    peft_names: ClassVar = {"A": "lora_A.weight", "B": "lora_B.weight"}
    examples: ClassVar = {
        "lora": {"rank": 4},
        "lora (rs)": {"rank": 4, "rslora": True},
        "lora (frozen A)": {"rank": 4, "freeze_a": True},
    }

    def check(self, layer: Layer) -> None:
        check_fits(self.rank, self.name, layer)

    @property
    def s(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def specs(self, layer: Layer) -> dict[str, Spec]:
        if isinstance(layer, ExpertsLayer):
            found: dict[str, Spec] = {}
            for name, p in layer.stacks().items():
                count, a, b = p.shape
                found[f"{name}_A"] = Spec((count, self.rank, b), trainable=not self.freeze_a)
                found[f"{name}_B"] = Spec((count, a, self.rank))
            return found
        return {"A": Spec((self.rank, layer.n), trainable=not self.freeze_a), "B": Spec((layer.m, self.rank))}

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        if isinstance(layer, ExpertsLayer):
            return {n: kaiming(s.shape, ctx.rng) for n, s in self.specs(layer).items() if n.endswith("_A")}
        return {"A": kaiming((self.rank, layer.n), ctx.rng)}

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Factors:
        return Factors(t["A"], t["B"], self.s * scale)

    def experts(self, t: Tensors, name: str, value: Tensor, scale: float) -> Tensor:
        return torch.baddbmm(
            value, t[f"{name}_B"].to(value.dtype), t[f"{name}_A"].to(value.dtype), alpha=self.s * scale
        )

    def inactive(self) -> frozenset[str]:
        return frozenset() if self.freeze_a else frozenset({"A"})

    def faster(self) -> frozenset[str]:
        return frozenset({"B"})

    def linear(self) -> bool:
        return self.freeze_a

    def linear_note(self) -> str:
        return "B A is a product of two trained factors"

    def peft_config(self) -> dict[str, Any] | None:
        return {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "use_dora": False,
            "init_lora_weights": True,
            "lora_dropout": 0.0,
            "bias": "none",
        }

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        if isinstance(layer, ExpertsLayer):
            return _experts_to_peft(t, layer)
        return super().to_peft(t, layer)

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        init = config.get("init_lora_weights", True)
        # Inits that leave the base weight as it is; the others (pissa, olora, corda, …) change it.
        plain = init in (True, False, "gaussian", "orthogonal", "eva")
        if config.get("use_dora") or not plain:
            return None
        return LoRA(int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora", False)))

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        if isinstance(layer, ExpertsLayer):
            return _experts_from_peft(tensors, layer)
        return super().from_peft(layer, tensors, shared)


def _experts_to_peft(t: Tensors, layer: ExpertsLayer) -> dict[str, Tensor]:
    """PEFT wraps the parameters of a module one around the other, the last one outermost. Its A [experts·r, inputs]
    counts the ranks of an expert first, its B [outputs, r·experts] the experts of a rank."""
    found, names = {}, list(layer.stacks())
    for depth, name in enumerate(reversed(names)):
        a, b = t[f"{name}_A"], t[f"{name}_B"]
        if getattr(layer.module, "is_transposed", False):  # the parameter is [experts, inputs, outputs]
            a, b = b.mT, a.mT
        place = "base_layer." * depth
        found[f"{place}lora_A.weight"] = a.reshape(-1, a.shape[-1]).contiguous()
        found[f"{place}lora_B.weight"] = b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()
    return found


def _experts_from_peft(tensors: Tensors, layer: ExpertsLayer) -> dict[str, Tensor]:
    """The inverse of ``_experts_to_peft``."""
    found: dict[str, Tensor] = {}
    for depth, (name, p) in enumerate(reversed(layer.stacks().items())):
        count, place = p.shape[0], "base_layer." * depth
        a, b = tensors[f"{place}lora_A.weight"], tensors[f"{place}lora_B.weight"]
        a, b = a.view(count, -1, a.shape[-1]), b.view(b.shape[0], -1, count).permute(2, 0, 1)
        if getattr(layer.module, "is_transposed", False):
            a, b = b.mT, a.mT
        found |= {f"{name}_A": a.contiguous(), f"{name}_B": b.contiguous()}
    return found

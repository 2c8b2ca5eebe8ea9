"""Full-parameter training:  Φ = Φ₀ + ΔΦ  for every parameter of the chosen modules (arXiv 2106.09685, equation 1).

The trained tensors are the fp32 offsets ΔΦ, so the stored base Φ₀ is the reference. A module computes with
round(Φ₀ + ΔΦ) in the base's dtype, and a merged or saved model has the same bits. Weight decay moves the model toward
the base. Tied parameters have one offset and stay tied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer, is_dense
from earnest.adapters.targets import owners
from earnest.adapters.variant import Spec, Tensors, Variant, WeightAndBias, register
from earnest.models.quantised import QuantisedLinear
from earnest.settings import setting


@register
@dataclass(frozen=True)
class Full(Variant):
    """Train the model's own parameters: all of them, or those of some modules."""

    embeddings: bool = setting(True, "train the input embedding")
    head: bool = setting(True, "train the output layer; a model that ties it to the embedding needs both alike")

    name = "full"
    paper = "2106.09685"
    reference = "torch AdamW on the model's parameters"
    equation = "Φ = Φ₀ + ΔΦ"
    lr = 1e-5
    lr_source = "half of TRL's default for supervised training (SFTConfig: 2e-5)"
    targets = ("all",)
    examples: ClassVar = {"full": {}}

    def candidates(self, model: nn.Module) -> dict[str, nn.Module]:
        for name, module in model.named_modules():
            if isinstance(module, QuantisedLinear):
                raise AdapterError(
                    f"full: {name} is quantised ({module.kind}), and an update would be rounded away; load the model "
                    "unquantised, or train an adapter such as lora"
                )
        left_out = {id(_part(model, f"get_{which}_embeddings")) for which in self._left_out(model)}
        return {name: module for name, module in owners(model).items() if id(module) not in left_out}

    def _left_out(self, model: nn.Module) -> list[str]:
        embed, head = (_part(model, f"get_{which}_embeddings") for which in ("input", "output"))
        tied = embed is not None and head is not None and getattr(embed, "weight", 0) is getattr(head, "weight", 1)
        if tied and self.embeddings != self.head:
            raise AdapterError(
                f"full: embeddings is {self.embeddings} and head is {self.head}, but {type(model).__name__} ties both "
                "into one weight; set both to the same value"
            )
        return [which for which, wanted in (("input", self.embeddings), ("output", self.head)) if not wanted]

    def specs(self, layer: Layer) -> dict[str, Spec]:
        return {name: Spec(tuple(p.shape)) for name, p in layer.own().items()}

    def check(self, layer: Layer) -> None:
        for name, p in layer.own().items():
            if not is_dense(p):
                raise AdapterError(
                    f"full: {layer.name}.{name} is quantised ({p.dtype}), and an update would be rounded away; load "
                    "the model unquantised, or train an adapter such as lora"
                )

    def replace(self, t: Tensors, name: str, value: Tensor, scale: float) -> Tensor:
        return torch.add(value, t[name], alpha=scale)

    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        change = t["weight"].t() if layer.kind == "conv1d" else t["weight"]
        return torch.add(w, change, alpha=scale), b if b is None else torch.add(b, t["bias"], alpha=scale)

    def linear(self) -> bool:
        return True

    def export_note(self) -> str:
        return "it trains the weights themselves"


def _part(model: nn.Module, getter: str) -> Any:
    get = getattr(model, getter, None)
    return get() if callable(get) else None

"""Merging a layer: W' is computed in fp32 and rounded once; the base's own tensors are kept and put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer
from earnest.adapters.runtime import replaced, slots_of


@torch.no_grad()
def merged_weight(layer: Layer) -> tuple[Tensor, Tensor | None]:
    """(W', b') in fp32 of the layer with all its active adapters. A variant that replaces parameters comes first."""
    w, b = layer.weight(), layer.bias
    b = None if b is None else b.detach().float()
    for slot in sorted(slots_of(layer.module), key=lambda s: not s.replaces):
        if slot.gate.scale != 0.0:
            w, b = slot.variant.weight(slot.tensors, layer, w, b, slot.gate.scale)
    return w, b


@torch.no_grad()
def merged_parameters(layer: Layer) -> dict[str, Tensor]:
    """The module's own parameters with all active adapters, rounded once to their dtypes."""
    own, slots = layer.own(), [s for s in slots_of(layer.module) if s.gate.scale != 0.0]
    if all(slot.replaces for slot in slots):
        return {name: replaced(slots, name, p).detach() for name, p in own.items()}
    w, b = merged_weight(layer)
    found = {"weight": w if layer.kind == "linear" else w.t().contiguous()}
    found |= {"bias": b} if "bias" in own and b is not None else {}
    return {name: value.to(own[name].dtype) for name, value in found.items()}


@torch.no_grad()
def merge_layer(layer: Layer, made: dict[int, nn.Parameter] | None = None) -> None:
    """Merge a layer. ``made`` keeps the merged parameters by the id of the base's, so that tied ones stay tied."""
    if layer.stash is not None:
        raise AdapterError(f"{layer.name} is merged by another adapter; unmerge it first")
    if not layer.mergeable:
        raise AdapterError(
            f"{layer.name} is a {layer.base_class.__name__} whose weight is quantised or not its own: merging would "
            "round the update away; run it unmerged, or merge into the unquantised model"
        )
    made = {} if made is None else made
    own, new = layer.own(), merged_parameters(layer)
    layer.stash = {name: own[name] for name in new}
    for name, value in new.items():
        shared = made.get(id(own[name]))
        same = shared is not None and torch.equal(shared, value)
        layer.module._parameters[name] = shared if same else nn.Parameter(value, requires_grad=False)
        made.setdefault(id(own[name]), layer.module._parameters[name])  # type: ignore[arg-type]


def unmerge_layer(layer: Layer) -> None:
    assert layer.stash is not None
    layer.module._parameters.update(layer.stash)
    layer.stash = None

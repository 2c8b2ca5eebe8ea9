"""Merging a layer: W' is computed in fp32 and rounded once; the base's own tensors are kept and put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer
from earnest.adapters.runtime import slots_of


@torch.no_grad()
def merged_weight(layer: Layer) -> tuple[Tensor, Tensor | None]:
    """(W', b') in fp32 of the layer with all its active adapters."""
    w, b = layer.weight(), layer.bias
    b = None if b is None else b.detach().float()
    for slot in slots_of(layer.module):
        if slot.gate.scale != 0.0:
            w, b = slot.variant.weight(slot.tensors, layer, w, b, slot.gate.scale)
    return w, b


@torch.no_grad()
def merge_layer(layer: Layer) -> None:
    if layer.stash is not None:
        raise AdapterError(f"{layer.name} is merged by another adapter; unmerge it first")
    params = layer.module._parameters
    if not layer.mergeable:
        raise AdapterError(
            f"{layer.name} is a {layer.base_class.__name__} whose weight is quantised or not its own: merging would "
            "round the update away; run it unmerged, or merge into the unquantised model"
        )
    w, b = merged_weight(layer)
    w = w.to(layer.dtype)
    weight, bias = params["weight"], params.get("bias")
    assert weight is not None
    layer.stash = (weight, bias)
    params["weight"] = nn.Parameter(w if layer.kind == "linear" else w.t().contiguous(), requires_grad=False)
    if bias is not None and b is not None:
        params["bias"] = nn.Parameter(b.to(bias.dtype), requires_grad=False)


def unmerge_layer(layer: Layer) -> None:
    assert layer.stash is not None
    weight, bias = layer.stash
    layer.module._parameters["weight"] = weight  # type: ignore[assignment]
    if bias is not None:
        layer.module._parameters["bias"] = bias  # type: ignore[assignment]
    layer.stash = None

"""σ_max(ΔW) of every adapted module, differentiable by the adapter's parameters.

    σ = uᵀ ΔW v   with the leading singular vectors u, v held fixed;  ∂σ/∂ΔW = u vᵀ

If ΔW has factors, no dense matrix is formed. At ΔW = 0 the value and the gradient are 0 (a subgradient). If each rank
holds some rows of ΔW, they are gathered for u and v, and each rank's gradient is that of its rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters import Adapter
from earnest.adapters.delta import Delta
from earnest.adapters.layer import ModuleLayer
from earnest.adapters.linalg import gathered, is_sharded
from earnest.adapters.runtime import Slot
from earnest.engines.trained import local, part_of, sum_of_parts
from earnest.errors import ObjectiveError


def spectral_norms(adapter: Adapter, whole: bool = True) -> Float[Tensor, " L"]:
    """One number per module, in the order of ``adapter.slots``. ``whole=False``: only those of sharded modules have a
    gradient."""
    for path, slot in adapter.slots.items():
        if isinstance(slot.layer, ModuleLayer):
            raise ObjectiveError(
                f"the spectral norm of ΔW needs linear layers, and {path} is a {slot.layer.base_class.__name__}; train "
                "linear layers only (adapter.targets=all-linear), or leave the term out."
            )
    return torch.stack([_norm(slot, whole) for slot in adapter.slots.values()])


def _norm(slot: Slot, whole: bool) -> Float[Tensor, ""]:
    u, v = Delta(slot).leading()
    if any(map(is_sharded, slot.tensors.values())):
        return _norm_of_rows(slot, u, v)
    with torch.set_grad_enabled(whole and torch.is_grad_enabled()):
        scale = slot.gate.scale
        if slot.variant.uses("factors") and not slot.variant.uses("weight"):
            factors = slot.variant.factors(slot.tensors, slot.layer, scale).plain()
            return factors.scale * ((u @ factors.left()) @ (factors.A.float() @ v))
        weight = slot.layer.weight()
        bias = None if slot.layer.bias is None else gathered(slot.layer.bias).float()
        merged, _ = slot.variant.weight(slot.tensors, slot.layer, weight, bias, scale)
        return u @ ((merged - weight) @ v)


def _norm_of_rows(slot: Slot, u: Float[Tensor, " m"], v: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """The same for offsets of which each rank holds some rows: the sum over the ranks, with the gradient of the own."""
    held = slot.tensors["weight"]
    left, right = (u, v) if slot.layer.kind == "linear" else (v, u)  # a Conv1D stores its weight transposed
    rows = local(held)
    own = (slot.gate.scale * (part_of(left, held) @ (rows @ right.to(rows.device)))).to(u.device)
    return own + (sum_of_parts(own.detach(), held) - own.detach())

"""Copies of the weights of linear layers in the order in which oneDNN reads them, for decoding on a CPU.

torch's float32 product of a few rows with a weight copies the weight into blocks at every call. With a copy in that
order, the products of SmolLM2 take 0.7 of the time at 32 rows and 0.6 at 8. The copy takes as long as it saves in about
eight tokens. The results differ by rounding.

The copies exist while a sampler does. Inside ``with PackedWeights(policy)`` the layers compute with them; a weight that
was replaced or written since is copied again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from earnest.models.policy import Policy

PACKED_BYTES = 2 << 30  # of weights; the smallest weights of a larger model stay as they are
PACKED_FROM = 16  # new tokens of a completion, from which on the copies are made
_LEAST = 1 << 18  # elements of a weight; for a smaller one oneDNN's call costs what its product saves
_ROWS = 32  # the order is the same for all numbers of rows from 8 on


class _PackedWeight(Tensor):
    """The same weight; a linear map with it uses the copy."""

    copied: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and len(args) > 1 and type(args[1]) is cls and not kwargs:
                x, weight, bias = (*args, None)[:3]
                if x.dtype == torch.float32 and not torch.is_grad_enabled():
                    return torch.ops.mkldnn._linear_pointwise(x, weight.copied, bias, "none", [], "")
            return func(*args, **(kwargs or {}))


class PackedWeights:
    """The packed copies of a policy's weights. Use it without gradients and in one thread at a time."""

    def __init__(self, policy: Policy) -> None:
        self._modules = packable(policy.model)
        self._made: dict[nn.Module, tuple[Tensor, int, _PackedWeight]] = {}
        self._own: dict[nn.Module, nn.Parameter] = {}

    def __enter__(self) -> None:
        for module in self._modules:
            own = module._parameters["weight"]
            if type(own) is not nn.Parameter or not _usable(own):  # sharded, for example
                continue
            weight, version, made = self._made.get(module, (None, -1, None))
            if made is None or weight is not own or version != own._version:
                made = own.detach().as_subclass(_PackedWeight)
                made.copied = torch.ops.mkldnn._reorder_linear_weight(own.detach(), _ROWS)
                self._made[module] = (own, own._version, made)
            self._own[module] = own
            module._parameters["weight"] = made  # type: ignore[assignment]  # a tensor; only the forward reads it

    def __exit__(self, *_: object) -> None:
        for module, own in self._own.items():
            module._parameters["weight"] = own
        self._own.clear()


def packable(model: nn.Module) -> list[nn.Linear]:
    """The linear layers whose weights are packed: the largest ones, up to ``PACKED_BYTES`` in total."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return []
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and _usable(m._parameters.get("weight"))]
    chosen, total = [], 0
    for module in sorted(found, key=lambda m: -m.in_features * m.out_features):
        total += 4 * module.in_features * module.out_features
        if total > PACKED_BYTES:
            break
        chosen.append(module)
    return chosen


def _usable(weight: Tensor | None) -> bool:
    return (
        isinstance(weight, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.ndim == 2
        and weight.numel() >= _LEAST
        and weight.is_contiguous()
    )

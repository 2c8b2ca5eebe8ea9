"""Faster products of a few rows with the weights of linear layers, for decoding on a CPU.

Several rows: torch's float32 product copies the weight into blocks at every call. With a copy of the weight in the
order in which oneDNN reads it, the products of SmolLM2 take 0.7 of the time at 32 rows and 0.6 at 8. The copy takes as
long as it saves in about eight tokens.

One row: the product of a matrix with a vector reads every weight once. On some processors MKL's single product reads
more slowly than its batched one (SmolLM2's head in one thread: 10.3 and 6.0 ms), on others it does not (11.7 and
22 ms). Both are timed once in a process, and where the batched one wins, the weight is read as two halves, without a
copy:

    W x = [W₁ x; W₂ x]

The results differ from torch's by rounding. Inside ``with PackedWeights(policy)`` the layers compute like this; a
weight that was replaced or written since is copied again. Writes through ``.data`` are looked for at a few elements of
each weight, so a write of single elements may be missed. The copies exist while a sampler does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from earnest.models.policy import Policy
from earnest.models.written import FEW, tensor_key

PACKED_BYTES = 2 << 30  # of copies; the smallest weights of a larger model get none
PACKED_FROM = 16  # new tokens of a completion, from which on the copies are made
_LEAST = 1 << 18  # elements of a weight; for a smaller one the call costs what its product saves
_TIMED = (8192, 576)  # the shape of the weight with which products of one row are timed: larger than most L2 caches
_ROWS = 32  # the order is the same for all numbers of rows from 8 on


class _PackedWeight(Tensor):
    """The same weight; a linear map of one row reads it in halves, one of several rows uses the copy, if there is
    one."""

    copied: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and len(args) > 1 and type(args[1]) is cls and not kwargs:
                x, weight, bias = (*args, None)[:3]
                if x.dtype == torch.float32 and not torch.is_grad_enabled():
                    if x.numel() == weight.shape[1] and weight.shape[0] % 2 == 0 and _halves_are_faster():
                        return _one_row(x, weight, bias)
                    if weight.copied is not None:
                        return torch.ops.mkldnn._linear_pointwise(x, weight.copied, bias, "none", [], "")
            return func(*args, **(kwargs or {}))


@functools.cache
def _halves_are_faster() -> bool:
    """Whether one row is multiplied with the halves of a weight faster than with the whole, on this processor."""
    weight, x, spans = torch.ones(_TIMED), torch.ones(1, _TIMED[1]), dict[bool, float]()
    for halves in (False, True) * 5:
        began = time.perf_counter()
        if halves:
            _one_row(x, weight, None)
        else:
            nn.functional.linear(x, weight)
        spans[halves] = min(spans.get(halves, torch.inf), time.perf_counter() - began)
    return spans[True] < spans[False]


def _one_row(x: Float[Tensor, "... n"], weight: Float[Tensor, "m n"], bias: Tensor | None) -> Float[Tensor, "... m"]:
    m, n = weight.shape
    both = x.reshape(1, 1, n).expand(2, 1, n).transpose(1, 2)  # as a transposed row: torch copies other strides
    found = torch.bmm(weight.view(2, m // 2, n), both).view(*x.shape[:-1], m)
    return found if bias is None else found + bias


class PackedWeights:
    """The weights of a policy for fast products. Use it without gradients and in one thread at a time. ``copies``:
    whether there are copies for products of several rows; it can be switched on later."""

    def __init__(self, policy: Policy, copies: bool = True) -> None:
        self.copies = copies
        self._modules = linears(policy.model)
        self._packable = set(packable(policy.model))
        self._made: dict[nn.Module, tuple[tuple[int, ...], _PackedWeight, Tensor]] = {}
        """Layer → key, what computes, and the weight, so that its id is not given to another one."""
        self._own: dict[nn.Module, nn.Parameter] = {}

    def __enter__(self) -> None:
        for module in self._modules:
            own = module._parameters["weight"]
            if type(own) is not nn.Parameter or not _usable(own):  # sharded, for example
                continue
            copies = self.copies and module in self._packable
            key = tensor_key(own, FEW if copies else 0)
            before, made, _ = self._made.get(module, (None, None, None))
            if made is None or before != key:
                made = own.detach().as_subclass(_PackedWeight)
                if copies:
                    made.copied = torch.ops.mkldnn._reorder_linear_weight(own.detach(), _ROWS)
                self._made[module] = (key, made, own)
            self._own[module] = own
            module._parameters["weight"] = made  # type: ignore[assignment]  # a tensor; only the forward reads it

    def __exit__(self, *_: object) -> None:
        for module, own in self._own.items():
            module._parameters["weight"] = own
        self._own.clear()


def linears(model: nn.Module) -> list[nn.Linear]:
    """The linear layers with weights of at least ``_LEAST`` elements in float32 on a CPU."""
    return [m for m in model.modules() if isinstance(m, nn.Linear) and _usable(m._parameters.get("weight"))]


def packable(model: nn.Module) -> list[nn.Linear]:
    """The linear layers whose weights are copied: the largest ones, up to ``PACKED_BYTES`` in total."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return []
    chosen, total = [], 0
    for module in sorted(linears(model), key=lambda m: -m.in_features * m.out_features):
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

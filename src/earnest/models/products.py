"""Faster matrix products during sampling: copies of the weights in the layout of oneDNN's kernels.

On a CPU in float32 the general product reads a weight in the layout in which it is stored, and rearranges it at every
call. With a weight that was rearranged once it does not. `benchmarks/sampling.py` compares whole completions with the
bare products. The copies are made at the beginning of the block and dropped at its end, so they are never older than
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from earnest.models.policy import Policy

_PAYS = 512  # from this many tokens on, rearranging the weights costs less than it saves
_SMALLEST = 1 << 18  # elements of a weight; for a smaller weight the call costs more than it saves
_MOST_BYTES = 4 << 30  # limit for all copies together


@contextmanager
def packed(policy: Policy, tokens: int) -> Iterator[None]:
    """Make large products faster inside the block, which samples about ``tokens`` tokens and changes no weight."""
    modules = _found(policy) if tokens >= _PAYS else []
    for module in modules:
        assert isinstance(module.weight, Tensor)
        vars(module)["forward"] = _forward(module.weight.detach(), module.bias)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _found(policy: Policy) -> list[nn.Linear]:
    if policy.device.type != "cpu" or policy.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return []
    found = [m for m in policy.model.modules() if isinstance(m, nn.Linear) and _plain(m)]
    return found if sum(m.weight.numel() * 4 for m in found) <= _MOST_BYTES else []


def _plain(module: nn.Linear) -> bool:
    """Whether the module computes x Wᵀ + b from its current weight and bias, and the weight is large and dense. A
    module of another class, such as one with an adapter, declares this by ``computes_own_weight``."""
    own = type(module).forward is nn.Linear.forward or bool(getattr(module, "computes_own_weight", False))
    if not own or "forward" in vars(module):
        return False
    weight = module.weight
    dense = type(weight.data) is Tensor and weight.dtype == torch.float32 and weight.is_contiguous()
    return dense and weight.numel() >= _SMALLEST


def _forward(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    copy = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(input: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "the copies have no gradient"
        found = product(input, copy, bias, "none", [], "")
        assert isinstance(found, Tensor)
        return found

    return forward

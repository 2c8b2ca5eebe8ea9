"""What a step computes in, and what rounding in that dtype may come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.restore import observed

UNITS = 64  # what rounding may add up to, in units in the last place: far below a wrong formula
COARSE = 1e-4  # bf16 and fp16 have a larger eps: there a multiple of eps would let anything pass


def rounding(*values: Tensor, precision: torch.dtype | None = None) -> float:
    """The relative error that rounding may add up to, in the coarsest dtype of these; at most ⅛, in 8 bits of bf16."""
    dtypes = [v.dtype for v in values if v.is_floating_point()] + ([precision] if precision is not None else [])
    return min(0.125, UNITS * max((torch.finfo(d).eps for d in dtypes), default=0.0))


def is_coarse(p: Tensor) -> bool:
    return p.is_floating_point() and torch.finfo(p.dtype).eps > COARSE


@contextmanager
def noticing(model: nn.Module) -> Iterator[list[torch.dtype]]:
    """Fills a list with dtypes that are coarser than the parameters of the module that puts them out: autocast."""
    seen: list[torch.dtype] = []

    def look(module: nn.Module, _args: Any, output: Any) -> None:
        own = [torch.finfo(p.dtype).eps for p in module.parameters(recurse=False) if p.is_floating_point()]
        floats = isinstance(output, Tensor) and output.is_floating_point()
        if own and floats and torch.finfo(output.dtype).eps > max(own):
            seen.append(output.dtype)

    with observed(model.modules(), look):
        yield seen


def coarsest(seen: Sequence[torch.dtype]) -> torch.dtype | None:
    return max(seen, key=lambda d: torch.finfo(d).eps, default=None)

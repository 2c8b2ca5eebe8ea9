"""A subject is something that is not a loss, declared like one, with laws of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from earnest.audit.gradient import Gradient
from earnest.audit.verdict import Finding

UNITS = 64  # what rounding may add up to, in units in the last place: far below a wrong formula (as the laws of a Step)
COARSE = 1e-4  # bf16 and fp16 have a larger eps: there a multiple of eps would let anything pass


@runtime_checkable
class Subject(Protocol):
    """``check`` yields findings; it leaves what it was given as it was, as far as it can be told how: what the caller's
    own functions move (a perturbation, a run) only they can restored."""

    def check(self) -> Iterator[Finding]: ...


def rounding(*values: Tensor, precision: torch.dtype | None = None) -> float:
    """The relative error that rounding may add up to, in the coarsest dtype of these; at most ⅛, in 8 bits of bf16."""
    dtypes = [v.dtype for v in values if v.is_floating_point()] + ([precision] if precision is not None else [])
    return min(0.125, UNITS * max((torch.finfo(d).eps for d in dtypes), default=0.0))


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| entry by entry; 0 where they are equal, which two infinities of one sign are."""
    a, b = a.detach(), b.detach()
    return torch.where(a == b, torch.zeros_like(a - b), (a - b).abs())


def largest(t: Tensor) -> float:
    """The largest entry; 0 where there is none, NaN where one is NaN."""
    return float(t.max()) if t.numel() else 0.0


def nudged(model: nn.Module, seed: int, precision: torch.dtype | None) -> float:
    """Every trainable parameter moves by one unit in the last place of what the step computes in; returns the largest
    such unit."""
    floating = [p for p in model.parameters() if p.requires_grad]
    rng = torch.Generator().manual_seed(seed)
    units = [max(torch.finfo(d).eps for d in (p.dtype, precision or p.dtype)) for p in floating]
    with torch.no_grad():
        for p, unit in zip(floating, units, strict=True):
            side = torch.randn(p.shape, generator=rng).sign().to(p.device, p.dtype)
            p.add_(p.abs() * unit * side)
    return max(units)


def room_of(floor: float, unit: float) -> float:
    """What two gradients that ought to be equal may differ by, as for a ``Step``: 16 times (8 in 16 bits) what one unit
    in the last place of every parameter does."""
    return min(0.5, 8 * max(floor, unit) if unit > COARSE else 16 * max(floor, 4 * unit))


def left_in(model: nn.Module) -> Gradient:
    """A copy of what stands in ``.grad``."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return Gradient({n: None if p.grad is None else p.grad.detach().clone() for n, p in named})


def rows_of(batch: Mapping[str, Any]) -> int:
    sizes = [v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.ndim]
    return max(set(sizes), key=sizes.count)


def uneven(rows: int) -> list[int]:
    first = max(1, rows // 4)
    return [first, rows - first] if rows > 1 else [1]


def cut(batch: Mapping[str, Any], rows: int, split: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Parts of N rows; what has no rows (a number, a text) goes with every part."""
    start = 0
    for size in split:
        part = slice(start, start + size)
        yield {k: v[part] if _has_rows(v, rows) else v for k, v in batch.items()}
        start += size


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and value.shape[0] == rows
    return isinstance(value, list | tuple) and len(value) == rows and not hasattr(value, "_fields")


@contextmanager
def noticing(model: nn.Module) -> Iterator[list[torch.dtype]]:
    """Fills a list with dtypes that are coarser than the parameters of the module that puts them out: autocast."""
    seen: list[torch.dtype] = []

    def look(module: nn.Module, _args: Any, output: Any) -> None:
        own = [torch.finfo(p.dtype).eps for p in module.parameters(recurse=False) if p.is_floating_point()]
        floats = isinstance(output, Tensor) and output.is_floating_point()
        if own and floats and torch.finfo(output.dtype).eps > max(own):
            seen.append(output.dtype)

    hooks = [m.register_forward_hook(look) for m in model.modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def coarsest(seen: Sequence[torch.dtype]) -> torch.dtype | None:
    return max(seen, key=lambda d: torch.finfo(d).eps, default=None)


def judged(code: str, subject: str, measured: str, expected: str, holds: bool, meaning: str) -> Finding:
    return Finding(code, subject, measured, expected, "holds" if holds else "fails", "" if holds else meaning)


def unjudged(code: str, subject: str, measured: str, meaning: str) -> Finding:
    """A row that is neither a pass nor a failure, with the reason."""
    return Finding(code, subject, measured, "-", "not applicable", meaning)

"""A subject is something that is not a loss, declared like one, with laws of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from earnest.audit.verdict import Finding

UNITS = 64  # what rounding may add up to, in units in the last place: far below a wrong formula (as the laws of a Step)


@runtime_checkable
class Subject(Protocol):
    """``check`` yields findings; it leaves what it was given as it was."""

    def check(self) -> Iterator[Finding]: ...


def rounding(*values: Tensor, precision: torch.dtype | None = None) -> float:
    """The relative error that rounding may add up to, in the coarsest dtype of these; at most ⅛, in 8 bits of bf16."""
    dtypes = [v.dtype for v in values if v.is_floating_point()] + ([precision] if precision is not None else [])
    return min(0.125, UNITS * max((torch.finfo(d).eps for d in dtypes), default=0.0))


def judged(code: str, subject: str, measured: str, expected: str, holds: bool, meaning: str) -> Finding:
    return Finding(code, subject, measured, expected, "holds" if holds else "fails", "" if holds else meaning)

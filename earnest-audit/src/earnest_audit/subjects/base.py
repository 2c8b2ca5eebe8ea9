"""A subject is something that is not a loss, declared like one, with a law of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from earnest_audit.law import Law, Reporter
from earnest_audit.precision import rounding
from earnest_audit.verdict import Finding

T = TypeVar("T")


class Subject(Reporter):
    """Its docstring is the page of its law and begins with the law's code. ``check`` yields findings and restores what
    it changed itself. What the caller's own functions change (a perturbation, a run), only they can restore."""

    law: ClassVar[Law]

    def __init_subclass__(cls, *, name: str) -> None:
        page = inspect.cleandoc(cls.__doc__ or "")
        cls.code = page.partition(":")[0]
        cls.law = Law(cls.code, f"{name} ({cls.__name__})", page, cls.check, declared=cls)

    def check(self) -> Iterator[Finding]:
        """The rows of this subject's law."""
        raise NotImplementedError  # abstract: every subject defines it

    def same(self, subject: str, a: Tensor, b: Tensor, meaning: str, tolerance: float | None = None) -> Finding:
        """Two outputs agree up to the tolerance, relative to the largest; none: rounding in their dtype."""
        off = largest(gap(a, b)) / max(largest(a.detach()[a.isfinite()].abs()), 1e-12)
        return self.agrees(subject, off, rounding(a) if tolerance is None else tolerance, meaning)

    def moved(self, subject: str, a: Tensor, b: Tensor, meaning: str) -> Finding:
        """Two outputs differ."""
        by = largest(gap(a, b))
        return self.finding(subject, f"moved the outputs by {by:.2g}", "above 0", by > 0, meaning)

    def setting_matters(
        self, name: str, value: float, others: Sequence[float], run: Callable[..., Any], why: str
    ) -> Finding:
        """Some other value of a setting gives another result of ``run(**{name: value})``; values that are not allowed
        are passed over."""
        subject, usual, tried = f"setting {name}", run(**{name: value}), 0
        for other in others:
            try:
                found = run(**{name: other})
            except Exception:
                continue
            tried += other != value
            if not equal(found, usual):
                return self.finding(subject, f"{value:g} → {other:g} changes the result", "it matters", True)
        if not tried:
            return self.not_applicable(subject, "no other value is taken")
        meaning = f"{name} does nothing: {why}"
        return self.finding(subject, "no other value changes the result", "it matters", False, meaning)

    def untouched(self, call: Callable[..., Any], inputs: Mapping[str, Any], meaning: str) -> tuple[Any, Finding]:
        """What ``call`` returns for copies of these inputs, and whether it wrote into them."""
        handed = copy.deepcopy(dict(inputs))
        given = call(*handed.values())
        written = " and ".join(name for name, value in inputs.items() if not equal(handed[name], value))
        whose = " and ".join(inputs) if len(inputs) == 1 else "inputs"
        measured = f"{written or 'nothing'} changed"
        return given, self.finding(f"the {whose} afterwards", measured, "nothing changed", not written, meaning)


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| entry by entry; 0 where they are equal, which two infinities of one sign are."""
    a, b = a.detach(), b.detach()
    return torch.where(a == b, torch.zeros_like(a - b), (a - b).abs())


def equal(a: Any, b: Any) -> bool:
    """Whether two values, or two containers of them at any depth, are the same, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def copied(call: T) -> T:
    """A copy of what may keep a state between calls; what cannot be copied is taken to have none."""
    try:
        return copy.deepcopy(call)
    except Exception:
        return call


def outputs(call: Callable[..., Tensor], *given: Any) -> Tensor:
    with torch.enable_grad():  # what is called may train
        return call(*given).detach().clone()


def largest(t: Tensor) -> float:
    """The largest entry; 0 where there is none, NaN where one is NaN."""
    return float(t.max()) if t.numel() else 0.0

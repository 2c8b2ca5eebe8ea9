"""A subject is something that is not a loss, declared like one, with a law of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from earnest_audit.errors import SubjectError
from earnest_audit.law import Law, Reporter
from earnest_audit.precision import rounding
from earnest_audit.restore import without_dropout
from earnest_audit.subjects.declared import Called, misfit, of_kind
from earnest_audit.verdict import Finding

T = TypeVar("T")


class Subject(Reporter):
    """Its docstring is the page of its law and begins with the law's code. ``check`` yields findings and restores what
    it changed itself; what the caller's own functions change, only they can restore. A ``SubjectError`` is raised where
    a declaration, or what a declared function returns, is not of the field's type."""

    law: ClassVar[Law]

    def __init_subclass__(cls, *, name: str) -> None:
        page = inspect.cleandoc(cls.__doc__ or "")
        cls.code = page.partition(":")[0]
        cls.law = Law(cls.code, f"{name} ({cls.__name__})", page, cls.checked, declared=cls)

    def __post_init__(self) -> None:
        for name, hint, default in self._fields():
            if (value := getattr(self, name)) is not default and (why := misfit(value, hint)):
                raise self.error(name if callable(value) else f"{name}={value!r:.60}", why)

    def checked(self) -> Iterator[Finding]:
        """``check``, in which what the declared functions return is compared with their types too."""
        inside = copy.copy(self)
        for name, hint, _ in self._fields():
            if (function := of_kind(hint, Callable)) and (value := getattr(self, name)) is not None:
                setattr(inside, name, Called(value, name, (*get_args(function), None)[1], self.error))
        yield from inside.check()

    def check(self) -> Iterator[Finding]:
        """The rows of this subject's law."""
        raise NotImplementedError  # abstract: every subject defines it

    @classmethod
    def error(cls, what: str, why: str) -> SubjectError:
        return SubjectError(f"{cls.__name__}({what}): {why} (`earnest-audit laws {cls.code}` explains it).")

    @classmethod
    def _fields(cls) -> list[tuple[str, Any, Any]]:
        """Name, type and default of each declaration."""
        hints = get_type_hints(cls)
        return [(f.name, hints[f.name], f.default) for f in fields(cls)]  # type: ignore[arg-type]

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
        """Some other value of a setting gives another result of ``run(**{name: value})``; others may be refused."""
        subject, usual, tried = f"setting {name}", run(**{name: value}), 0
        for other in others:
            with suppress(Exception):
                found = run(**{name: other})
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


def equal(a: Any, b: Any, within: tuple[int, ...] = ()) -> bool:
    """Whether two values, at any depth, are the same, or both NaN. What cannot be compared is taken to be the same."""
    if a is b or id(a) in within or type(a) is not type(b):
        return a is b or id(a) in within
    if isinstance(a, Tensor | np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[k], b[k], (*within, id(a))) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y, (*within, id(a))) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__"):
        return equal(vars(a), vars(b), (*within, id(a)))
    comparable = getattr(type(a), "__eq__", None) is not object.__eq__
    return not comparable or bool(a == b or (a != a and b != b))


def copied(call: T) -> T:
    """A copy of what may keep a state between calls; what cannot be copied is taken to have none."""
    try:
        return copy.deepcopy(call)
    except Exception:
        return call


def outputs(call: Callable[..., Tensor], *given: Any, model: nn.Module | None = None) -> Tensor:
    """What a call that may train returns. Dropout is off in ``model`` and in modules that are given or part of that."""
    reached = [model, *given, *(part for x in given for part in getattr(x, "__dict__", {}).values())]
    with ExitStack() as stack, torch.enable_grad():
        for module in (m for m in reached if isinstance(m, nn.Module)):
            stack.enter_context(without_dropout(module))
        return call(*given).detach().clone()


def largest(t: Tensor) -> float:
    """The largest entry; 0 where there is none, NaN where one is NaN."""
    return float(t.detach().max()) if t.numel() else 0.0


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two log-probs, over the larger of 1 and their size; equal infinities do not differ."""
    size = torch.maximum(a.abs(), b.abs()).clamp_min(1.0).nan_to_num(posinf=1.0)
    return largest(gap(a, b) / size)

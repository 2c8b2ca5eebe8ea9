"""A subject is something that is not a loss, declared like one, with a law of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from earnest_audit.gradient import Gradient
from earnest_audit.law import Law
from earnest_audit.precision import COARSE, rounding
from earnest_audit.restore import restored, seeded
from earnest_audit.verdict import Finding

T = TypeVar("T")


@runtime_checkable
class Subject(Protocol):
    """``check`` yields findings and restores what it changed itself. What the caller's own functions change (a
    perturbation, a run), only they can restore."""

    def check(self) -> Iterator[Finding]: ...


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| entry by entry; 0 where they are equal, which two infinities of one sign are."""
    a, b = a.detach(), b.detach()
    return torch.where(a == b, torch.zeros_like(a - b), (a - b).abs())


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference of a and b, over the largest finite size of a."""
    return largest(gap(a, b)) / max(largest(a.detach()[a.isfinite()].abs()), 1e-12)


def same(law: Law, subject: str, a: Tensor, b: Tensor, meaning: str, tolerance: float | None = None) -> Finding:
    """The row of two outputs that agree up to the tolerance, relative to the largest; none: rounding in their dtype."""
    return law.agrees(subject, relative(a, b), rounding(a) if tolerance is None else tolerance, meaning)


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


def setting_matters(
    law: Law, name: str, value: float, others: Sequence[float], run: Callable[..., Any], why: str
) -> Finding:
    """Some other value of a setting gives another result of ``run(**{name: value})``; values that are not allowed are
    passed over."""
    subject, usual, tried = f"setting {name}", run(**{name: value}), 0
    for other in others:
        try:
            found = run(**{name: other})
        except Exception:
            continue
        tried += other != value
        if not equal(found, usual):
            return law.finding(subject, f"{value:g} → {other:g} changes the result", "it matters", True)
    if not tried:
        return law.not_applicable(subject, "no other value is taken")
    return law.finding(subject, "no other value changes the result", "it matters", False, f"{name} does nothing: {why}")


def outputs(call: Callable[..., Tensor], *given: Any) -> Tensor:
    with torch.no_grad():
        return call(*given).detach().clone()


def largest(t: Tensor) -> float:
    """The largest entry; 0 where there is none, NaN where one is NaN."""
    return float(t.max()) if t.numel() else 0.0


def untouched(law: Law, call: Callable[..., Any], inputs: Mapping[str, Tensor], more: str) -> tuple[Any, Finding]:
    """What ``call`` returns for copies of these inputs, and whether it wrote into them."""
    handed = {name: t.clone() for name, t in inputs.items()}
    given = call(*handed.values())
    written = [name for name, t in inputs.items() if not handed[name].equal(t)]
    measured = f"{' and '.join(written) or 'nothing'} changed"
    meant = f"{more} (Where that is intended, declare in_place=True.)"
    return given, law.finding("the inputs afterwards", measured, "nothing changed", not written, meant)


def gradient_of(model: nn.Module, seed: int, act: Callable[[], Any]) -> Gradient:
    """What ``act`` leaves in ``.grad``, where nothing was before; the model is as it was afterwards."""
    with restored(model, None):
        for p in model.parameters():
            p.grad = None
        with seeded(seed), torch.enable_grad():
            act()
        return left_in(model)


def left_in(model: nn.Module) -> Gradient:
    """A copy of what stands in ``.grad``."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return Gradient({n: None if p.grad is None else p.grad.detach().clone() for n, p in named})


def room_of(
    model: nn.Module, seed: int, precision: torch.dtype | None, whole: Gradient, again: Callable[[], Gradient]
) -> tuple[float, float]:
    """What two gradients that ought to be equal may differ by, as for a ``Step``: 16 times (8 in 16 bits) what one unit
    in the last place of every parameter does, in what the step computes in; and the largest such unit."""
    rng, unit = torch.Generator().manual_seed(seed), 0.0
    with restored(model, None):
        for p in (p for p in model.parameters() if p.requires_grad):
            own = max(torch.finfo(d).eps for d in (p.dtype, precision or p.dtype))
            side = torch.randn(p.shape, generator=rng).sign().to(p.device, p.dtype)
            p.data.add_(p.detach().abs() * own * side)
            unit = max(unit, own)
        floor = whole.distance(again())
    return min(0.5, 8 * max(floor, unit) if unit > COARSE else 16 * max(floor, 4 * unit)), unit


def cut(batch: Mapping[str, Any], split: Sequence[int] | None) -> tuple[list[int], list[dict[str, Any]]]:
    """The numbers of rows of the parts (two uneven ones by default), and the parts; what has no rows (a number, a text)
    goes with every part."""
    sizes = [v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.ndim]
    rows = max(set(sizes), key=sizes.count)
    first = max(1, rows // 4)
    counts = list(split) if split is not None else [first, rows - first] if rows > 1 else [1]
    places = [slice(end - size, end) for size, end in zip(counts, accumulate(counts), strict=True)]
    return counts, [{k: v[place] if _has_rows(v, rows) else v for k, v in batch.items()} for place in places]


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and value.shape[0] == rows
    return isinstance(value, list | tuple) and len(value) == rows and not hasattr(value, "_fields")

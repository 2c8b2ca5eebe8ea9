"""Terms that sleep by design: a KL at its reference, a barrier below its τ. A sleeping term is no broken one, and says
nothing about whether it would work; so it is woken before it is judged.

    its threshold is set to half of what is measured, and where that is 0 the adapter is kicked first
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from earnest.audit.restore import kick_sizes
from earnest.engines.local import LocalEngine
from earnest.objectives.base import Objective, Value
from earnest.signals.batch import Batch

KICKS = (0.05, 0.2, 0.5, 1.0)  # times a parameter's own rms, or a typical one
SEEN = 1e-3  # nats, or a singular value's length: well above what fp32 rounds away


@dataclass(frozen=True)
class Awake:
    """``objective`` as it is judged; ``how`` says, for every term that slept, what was done to wake it."""

    objective: Objective
    how: dict[str, str]


@contextmanager
def awake(engine: LocalEngine, objective: Objective, batch: Batch, seed: int = 0) -> Iterator[Awake]:
    """Inside, no term sleeps that can be woken; afterwards the adapter has its old bits."""
    sleeping = asleep(engine, objective, batch)
    if not sleeping:
        yield Awake(objective, {})
        return
    kept = [p.detach().clone() for p in engine.parameters]
    try:
        now, _ = _woken(engine, objective, batch, sleeping)
        kicked = bool(asleep(engine, now, batch))
        for size in KICKS if kicked else ():
            _kick(engine, kept, size, seed)
            now, least = _woken(engine, objective, batch, sleeping)
            if least >= SEEN:
                break
        yield Awake(now, {label: _said(objective, now, label, kicked) for label in sleeping})
    finally:
        with torch.no_grad():
            for p, value in zip(engine.parameters, kept, strict=True):
                p.copy_(value)


def asleep(engine: LocalEngine, objective: Objective, batch: Batch) -> list[str]:
    """The live terms without a gradient that may be without one, here."""
    may = {w.term.label for w in objective.live() if "dormant_at_source" in w.term.laws}
    if not may:
        return []
    parts = Objective(tuple(w for w in objective.live() if w.term.label in may))
    return [label for label, (norm, _) in engine.gradient_shares(batch, parts).items() if norm == 0]


def _woken(engine: LocalEngine, objective: Objective, batch: Batch, sleeping: list[str]) -> tuple[Objective, float]:
    """The objective with the sleepers' thresholds in reach, and the least that one of them is then worth."""

    def values(of: Objective) -> dict[str, Value]:
        state = {**of.initial_state(), **engine.objective_state}
        return dict(of.evaluate(batch, engine.scalars(batch, of.needs(batch, state)), state).values)

    metrics = {label: {n: m.value for n, m in v.metrics.items()} for label, v in values(objective).items()}
    now = Objective(
        tuple(
            replace(w, term=w.term.woken(metrics[w.term.label])) if w.term.label in sleeping else w
            for w in objective.terms
        )
    )
    found = values(now)
    return now, min(abs(float(found[label].loss)) for label in sleeping)


def _kick(engine: LocalEngine, birth: list[Tensor], size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 29)
    with torch.no_grad():
        for p, old, by in zip(engine.parameters, birth, kick_sizes(birth, size), strict=True):
            p.copy_(old + (by * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype))


def _said(before: Objective, after: Objective, label: str, kicked: bool) -> str:
    (was,), (now,) = ([w.term for w in o.terms if w.term.label == label] for o in (before, after))
    moved = [f"{k} = {v:.3g}" for k, v in vars(now).items() if v != getattr(was, k)]
    return " and ".join((["a kick away"] if kicked else []) + [f"with {m}" for m in moved])

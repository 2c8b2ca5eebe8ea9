"""Terms that are inactive by design when training begins: a KL at its reference, a barrier below its τ.

Such a term is not broken, and its zero gradient does not show whether it works. So the audit checks it in a state in
which it is active: its threshold is half of the measured value; if that value is 0, the adapter is perturbed first.
"""

from __future__ import annotations

from earnest.engines.local import LocalEngine
from earnest.objectives.base import Objective, Value
from earnest.proving.settings import rebuild
from earnest.signals.batch import Batch
from earnest_audit.probe import Probe
from earnest_audit.step import Active, Step

PERTURBATIONS = (0.05, 0.2, 0.5, 1.0)  # times a parameter's own rms, or a typical one
CLEAR = 1e-3  # nats, or a singular value: well above the rounding of fp32


def activation(engine: LocalEngine, objective: Objective, batch: Batch, step: Step) -> Active | None:
    """The settings and the perturbation at which every inactive term is active; None if all terms are active."""
    terms = inactive(engine, objective, batch)
    if not terms:
        return None
    probe = Probe(step)
    settings, _ = _reached(engine, objective, batch, terms)
    size = 0.0
    if inactive(engine, rebuild(objective, settings), batch):
        for size in PERTURBATIONS:
            with probe.perturbed(size):
                settings, least = _reached(engine, objective, batch, terms)
            if least >= CLEAR:
                break
    return Active(settings, size, {term: _how(settings, term, size) for term in terms})


def inactive(engine: LocalEngine, objective: Objective, batch: Batch) -> list[str]:
    """The live terms that have a zero gradient on this batch, and for which that can be by design."""
    may = {w.term.label for w in objective.live() if "inactive_at_source" in w.term.laws}
    if not may:
        return []
    parts = Objective(tuple(w for w in objective.live() if w.term.label in may))
    return [label for label, (norm, _) in engine.gradient_shares(batch, parts).items() if norm == 0]


def _reached(
    engine: LocalEngine, objective: Objective, batch: Batch, terms: list[str]
) -> tuple[dict[str, float], float]:
    """Settings with thresholds that the values of ``terms`` exceed, and the smallest of those values."""

    def values(of: Objective) -> dict[str, Value]:
        state = {**of.initial_state(), **engine.objective_state}
        return dict(of.evaluate(batch, engine.scalars(batch, of.needs(batch, state)), state).values)

    found = values(objective)
    settings: dict[str, float] = {}
    for term in (w.term for w in objective.terms if w.term.label in terms):
        reached = term.activated({n: m.value for n, m in found[term.label].metrics.items()})
        changed = {k: v for k, v in vars(reached).items() if v != getattr(term, k)}
        settings |= {f"{term.label}.{name}": value for name, value in changed.items()}
    now = values(rebuild(objective, settings))
    return settings, min(abs(float(now[term].loss)) for term in terms)


def _how(settings: dict[str, float], term: str, size: float) -> str:
    moved = [f"{k.partition('.')[2]} = {v:.3g}" for k, v in settings.items() if k.startswith(f"{term}.")]
    return " and ".join((["after a perturbation"] if size else []) + [f"with {m}" for m in moved])

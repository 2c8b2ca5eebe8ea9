"""``prove``: the laws of the audit on an engine's own training step.

The step is audited through the engine's own backward pass and update, guard and clipping included. The engine is
bit-equal afterwards. Terms that are inactive by design when training begins (a KL at its reference, a barrier below
its τ) are checked in a state in which they are active: a zero gradient does not show whether they work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from earnest.engines.local import LocalEngine
from earnest.objectives.base import Objective, Term, Value
from earnest.objectives.needs import SpectralNorm
from earnest.proving import sharded
from earnest.proving.settings import rebuild
from earnest.proving.step import step_of
from earnest.signals.batch import Batch
from earnest_audit import Finding, Verdict, audit
from earnest_audit.laws import LAWS, liveness
from earnest_audit.probe import Probe
from earnest_audit.restore import held_by, remembered
from earnest_audit.step import Active, Step
from earnest_audit.verdict import judged


def prove(
    engine: LocalEngine,
    objective: Objective | Term,
    batch: Batch,
    *,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Check the laws of a training step on this engine, objective and batch.

    ``quick`` checks law GL alone (every term and every parameter has a gradient and moves, nothing else does), with no
    more memory than a training step needs.
    """
    objective = Objective.of(objective)
    batch = batch.to(engine.policy.device)
    objective.check(batch)
    batch = relevant(objective, batch)
    reports: list[Mapping[str, float]] = []

    def updated() -> None:
        engine.planned = 1.0  # the laws hold at lr itself: an update of the proof has no place in a schedule
        reports.append(engine.update().guard)

    shared: list[Finding] = []
    if engine.mesh.size > 1:
        with restored(engine):
            shared = list(sharded.check(engine, objective, batch, reports))
    if engine.trained.any_sharded:
        why = "The trained parameters are in shards; `earnest check` with engine.shard=1 checks these laws."
        others = Finding("GL", "the other laws", "not checked", "one process", "not applicable", why)
        return Verdict((*shared, *_guard(engine, reports), others))
    with restored(engine):
        step = step_of(engine, objective, batch, update=updated)
        step = replace(step, active=activation(engine, objective, batch, step))
        verdict = audit(step, laws=(liveness.LAW,) if quick else LAWS, progress=progress)
    return verdict + Verdict((*shared, *_guard(engine, reports), *_skipped(objective)))


def relevant(objective: Objective, batch: Batch) -> Batch:
    """The rows that some live term reads: rows of its roles, with a teacher or a route if the term needs one. The laws
    are about these rows only; any other row correctly has no effect on the loss."""
    read = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
    for w in objective.live():
        if any(not isinstance(n, SpectralNorm) for n in w.term.needs(batch, w.term.initial_state())):
            read[batch.row[w.term.tokens(batch)]] = True
    kept = read.nonzero()[:, 0]
    return batch.rows(kept) if 0 < len(kept) < len(batch) else batch


def _guard(engine: LocalEngine, reports: list[Mapping[str, float]]) -> Iterator[Finding]:
    if engine.guard is None or not reports or not all("removed" in found for found in reports):
        return
    most = max(found["removed"] for found in reports)
    why = (
        "The guard finds nothing to remove: its directions meet no update (another adapter's, the wrong sign, or a "
        "batch without the unwanted behaviour). Extract them on this adapter and look at their held-out accuracy."
    )
    subject, measured = f"guard {type(engine.guard).__name__}", f"removes {most:.2g} of an update's length"
    yield judged("GL", subject, measured, f"above 0 within {len(reports)} steps", most > 0, why)


def _skipped(objective: Objective) -> Iterator[Finding]:
    for label in objective.skipped:
        yield Finding("GL", f"term {label}", "weight 0", "computed", "not applicable", "Weight 0: not computed.")


@contextmanager
def restored(engine: LocalEngine) -> Iterator[None]:
    """Restore the parameters, optimizer, version and states of the engine at the end of the block, also after an error.

    Hooks of the optimizer's step run inside the block: law GL detects one that moves a frozen weight.
    """
    parameters = [p.detach().clone() for p in engine.parameters]
    gradients = [p.grad for p in engine.parameters]
    optimizer = remembered(held_by([engine.optimizer], engine.parameters))
    version, state = engine.version, copy.deepcopy(engine.objective_state)
    guard, outer = engine.guard, engine.outer
    held = {k: v.clone() for k, v in guard.state_dict().items()} if guard else {}
    engine.outer = None  # an audit never reaches other replicas
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, grad in zip(engine.parameters, parameters, gradients, strict=True):
                p.copy_(value)
                p.grad = grad
        optimizer()
        engine.version, engine.objective_state, engine.outer = version, state, outer
        if guard:
            guard.load_state_dict(held)


PERTURBATIONS = (0.05, 0.2, 0.5, 1.0)  # times a parameter's own rms, or a typical one
CLEAR = 1e-3  # nats, or a singular value: well above the rounding of fp32


def activation(engine: LocalEngine, objective: Objective, batch: Batch, step: Step) -> Active | None:
    """The settings and the perturbation at which every inactive term is active; None if all terms are active. A
    threshold becomes half of the measured value; if that value is 0, the adapter is perturbed first."""
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

"""The report of a step, assembled by the same code for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from earnest.objectives.base import Objective, Value


@dataclass(frozen=True)
class TermReport:
    """One term in a step. ``value`` is before the weight; ``share``, on request, is its share of all gradient norms.

    ``divergence`` and ``estimator`` ("exact" or "sampled") are what the function that computed the term's divergence
    returned, never the requested settings; None for a term without a divergence.
    """

    kind: str
    ran: str
    weight: float
    value: float
    metrics: Mapping[str, float]
    gradient_norm: float | None = None
    share: float | None = None
    divergence: str | None = None
    estimator: str | None = None


@dataclass(frozen=True)
class UpdateReport:
    """What ``update`` did: the norm before clipping, the factor that clipping applied, the length of the step taken.

    ``learning_rate`` is the optimizer's at this update.
    """

    gradient_norm: float
    clip_factor: float
    update_norm: float
    version: int
    guard: Mapping[str, float] = field(default_factory=dict)
    outer: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What was computed: the passes over the batch that ran, and the tokens. ``computed_tokens`` are the positions that
    went through the model, ``padded_tokens`` those of them that are padding; ``layout`` is "packed" with the attention
    that ran, or "padded" with the reason."""

    passes: str
    micro_batches: int
    tokens: int
    computed_tokens: int
    padded_tokens: int
    layout: str


@dataclass(frozen=True)
class StepReport(Work):
    """The loss, each term's report, the update, and the work.

    ``skipped`` terms have weight 0; ``idle`` are live terms without any token in this batch, each with the reason.
    """

    loss: float
    terms: Mapping[str, TermReport]
    skipped: tuple[str, ...]
    idle: Mapping[str, str]
    update: UpdateReport

    @property
    def learned_nothing(self) -> str | None:
        """Why this step had nothing to learn from, or None if it had something."""
        update = self.update
        if update.learning_rate == 0:
            return "the learning rate is 0"
        if update.gradient_norm > 0:
            rounded = "no weight changed although the gradient is not 0: the update is below the weights' precision"
            return f"{rounded}, or the guard removed all of it" if update.update_norm == 0 else None
        flat = bool(self.terms) and all(t.metrics.get("advantage_zero") == 1 for t in self.terms.values())
        why = "every advantage is 0 (no two completions of a prompt differ in their reward)" if flat else None
        if update.gradient_norm != 0:  # not a number: a service does not report it
            return why
        moved = f"; momentum still moved the weights by {update.update_norm:.3g}" if update.update_norm > 0 else ""
        return (why or "the gradient is exactly 0") + moved

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for metrics.jsonl."""
        return asdict(self)


@dataclass(frozen=True)
class Pass(Work):
    """An objective on a whole batch whose gradient is accumulated but not yet applied. ``idle`` are the live terms
    without any token in the batch, each with the reason."""

    loss: float
    values: Mapping[str, Value]
    idle: Mapping[str, str]


def report_of(
    objective: Objective, done: Pass, update: UpdateReport, shares: Mapping[str, tuple[float, float]] | None = None
) -> StepReport:
    """The report of a step. ``shares``: (gradient norm, share) by label."""
    terms = {}
    for weighted in objective.terms:
        term, label = weighted.term, weighted.term.label
        if not weighted.weight or label in done.idle:
            continue
        value = done.values[label]
        worth = float(value.loss.detach())
        numbers = {name: metric.value for name, metric in value.metrics.items()}
        norm, share = (shares or {}).get(label, (None, None))
        computed = (value.divergence, value.estimator)
        terms[label] = TermReport(term.kind, value.ran, weighted.weight, worth, numbers, norm, share, *computed)
    work = {part.name: getattr(done, part.name) for part in fields(Work)}
    return StepReport(done.loss, terms, objective.skipped, done.idle, update, **work)

"""What a term of a loss is, and how terms add up.

    objective = GRPO(clip=0.2) + 0.5 * SFT()          # a sum of weighted terms is an objective

A term is a frozen dataclass. It declares the roles whose tokens it reads, the signals that it needs and the per-token scalars
that it asks the engine for; ``evaluate`` turns them into one differentiable number. It never sees a model. A term that misses
something raises before anything is computed, naming itself and what is missing: never a quiet 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.metrics import Metric
from earnest.objectives.needs import Need
from earnest.objectives.view import Scalars, View
from earnest.signals.batch import ROLES, Batch, Counts, Role

Signal = Literal["advantages", "behaviour", "reference.logprobs", "reference.distribution", "teacher", "correct"]


@dataclass(frozen=True)
class Value:
    """What a term came to: the loss as a graph on the scalars, what ran (said by what ran), and metrics."""

    loss: Tensor
    ran: str
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One channel of a loss. Subclasses are frozen dataclasses with a unique ``kind``, the first equation in their file.

    ``laws`` are facts about the term that the audit may rely on (for example "stop_gradient": its value is not the integral of its
    gradient; "batch_local": its normaliser is the micro-batch's own).
    """

    kind: ClassVar[str]
    paper: ClassVar[str]
    roles: ClassVar[tuple[Role, ...]] = ROLES
    laws: ClassVar[frozenset[str]] = frozenset()

    name: str | None = None

    @property
    def label(self) -> str:
        """The name in reports; unique within an objective."""
        return self.name or self.kind

    @property
    def additive(self) -> bool:
        """True where the loss is a sum over rows of functions of that row's scalars and of the global counts alone."""
        return True

    def signals(self) -> frozenset[Signal]:
        """The signals of the batch that this term reads; all of them are required."""
        return frozenset()

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        """The per-token scalars that this term asks the engine for."""
        raise NotImplementedError  # abstract: every concrete term defines it (tested over the registry)

    def evaluate(self, view: View) -> Value:
        """The loss of this term on its tokens."""
        raise NotImplementedError  # abstract: every concrete term defines it (tested over the registry)

    def initial_state(self) -> dict[str, Any]:
        """State that lives from step to step and in the checkpoint (JSON-able); most terms have none."""
        return {}

    def advance(self, state: Mapping[str, Any], value: float, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The state after an update that saw this value and these metrics."""
        return dict(state)

    def check(self, batch: Batch) -> None:
        """Raise where this batch lacks what the term needs. Called before anything is computed."""
        if not bool(batch.has_role(self.roles)[batch.row].any()):
            present = sorted(set(batch.role))
            raise SignalError(
                f"{self.label}: needs rows with role {' or '.join(self.roles)}, the batch has {', '.join(present)}; "
                "give it such rows, or take the term out of the objective."
            )
        for signal in sorted(self.signals()):
            if not _has(batch, signal):
                raise SignalError(
                    f"{self.label}: needs the signal {signal!r}, which the batch does not carry; "
                    "supply it (earnest.signals), or take the term out of the objective."
                )

    def __add__(self, other: Term | Objective) -> Objective:
        return Objective.of(self) + other

    def __mul__(self, weight: float) -> Objective:
        return Objective.of(self) * weight

    __rmul__ = __mul__


def _has(batch: Batch, signal: Signal) -> bool:
    owner: Any = batch
    for part in signal.split("."):
        owner = getattr(owner, part)
        if owner is None:
            return False
    return True


@dataclass(frozen=True)
class Weighted:
    """A term and the number that its loss is multiplied by."""

    weight: float
    term: Term


@dataclass(frozen=True)
class Evaluation:
    """An objective on a (micro-)batch: the summed loss as a graph on the scalars, and each term's own part."""

    loss: Tensor
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Objective:
    """A sum of weighted terms with unique labels."""

    terms: tuple[Weighted, ...]

    def __post_init__(self) -> None:
        labels = [w.term.label for w in self.terms]
        for label in labels:
            if labels.count(label) > 1:
                raise ObjectiveError(
                    f"two terms are called {label!r}; give one of them a name, e.g. {type(self.find(label)).__name__}(…, name='{label}_2')."
                )
        for w in self.terms:
            if not isinstance(w.weight, (int, float)) or w.weight != w.weight or abs(w.weight) == float("inf"):
                raise ObjectiveError(f"{w.term.label}: a weight is a finite number, got {w.weight!r}.")

    @classmethod
    def of(cls, value: Term | Objective) -> Objective:
        return value if isinstance(value, Objective) else cls((Weighted(1.0, value),))

    def __add__(self, other: Term | Objective) -> Objective:
        if not isinstance(other, (Term, Objective)):
            return NotImplemented
        return Objective(self.terms + Objective.of(other).terms)

    def __mul__(self, weight: float) -> Objective:
        return Objective(tuple(replace(w, weight=w.weight * float(weight)) for w in self.terms))

    __rmul__ = __mul__

    def find(self, label: str) -> Term:
        return next(w.term for w in self.terms if w.term.label == label)

    def live(self) -> Iterator[Weighted]:
        """The terms that are computed: those whose weight is not 0."""
        return (w for w in self.terms if w.weight != 0)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Labels of the terms with weight 0: not computed, and said so in every report."""
        return tuple(w.term.label for w in self.terms if w.weight == 0)

    @property
    def additive(self) -> bool:
        return all(w.term.additive for w in self.live())

    def check(self, batch: Batch) -> None:
        if not any(True for _ in self.live()):
            raise ObjectiveError(f"no term has a weight other than 0 ({', '.join(self.skipped) or 'there is no term'}): nothing would be trained.")
        for w in self.live():
            w.term.check(batch)

    def initial_state(self) -> dict[str, dict[str, Any]]:
        return {w.term.label: w.term.initial_state() for w in self.terms}

    def needs(self, batch: Batch, state: Mapping[str, Mapping[str, Any]]) -> tuple[Need, ...]:
        """Every scalar that a live term needs, once, in a fixed order."""
        wanted = (need for w in self.live() for need in w.term.needs(batch, state.get(w.term.label, {})))
        return tuple(dict.fromkeys(wanted))

    def evaluate(
        self,
        batch: Batch,
        scalars: Scalars,
        state: Mapping[str, Mapping[str, Any]],
        counts: Mapping[str, Counts] | None = None,
    ) -> Evaluation:
        """The weighted sum over this batch. ``counts`` are the whole optimizer batch's, by term label, when this is a part of it."""
        values: dict[str, Value] = {}
        total: Tensor | None = None
        for w in self.live():
            label = w.term.label
            whole = counts[label] if counts is not None else batch.counts(w.term.roles)
            view = View.of(batch, scalars, w.term.roles, whole, state.get(label, {}), label)
            if len(view) == 0:
                continue  # a micro-batch without this term's rows; the whole batch has some (check)
            value = w.term.evaluate(view)
            if value.loss.ndim != 0:
                raise ObjectiveError(f"{label}: a term's loss is one number, got shape {tuple(value.loss.shape)}.")
            if not bool(torch.isfinite(value.loss)):
                raise ObjectiveError(
                    f"{label}: the loss is {float(value.loss)}; look at its inputs (extreme ratios, an empty mask) in {value.metrics}."
                )
            values[label] = value
            part = value.loss * w.weight
            total = part if total is None else total + part
        assert total is not None, "check() admits only batches on which a live term has tokens"
        return Evaluation(total, values)

    def counts(self, batch: Batch) -> dict[str, Counts]:
        return {w.term.label: batch.counts(w.term.roles) for w in self.live()}

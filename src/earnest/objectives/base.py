"""What a term of a loss is, and how terms add up.

    objective = GRPO(clip=0.2) + 0.5 * SFT()          # a sum of weighted terms is an objective

A term is a frozen dataclass. It declares the roles whose tokens it reads, the signals that it needs and the per-token
scalars that it needs from the engine; ``evaluate`` turns them into one differentiable number. It never sees a model. A
term that lacks an input raises before anything is computed; the error names the term and the input.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool
from torch import Tensor

from earnest.errors import EarnestError, NothingToTrain, ObjectiveError, SignalError
from earnest.objectives.metrics import Max, Metric
from earnest.objectives.needs import LogProb, Need
from earnest.objectives.view import Scalars, View
from earnest.settings import Checked, setting
from earnest.signals.advantages import ESTIMATORS, Estimator
from earnest.signals.batch import ROLES, Batch, Counts, Role, Signal
from earnest.signals.scorer import Who
from earnest.signals.wants import Wants


@dataclass(frozen=True)
class Value:
    """A term's result: the loss as a graph on the scalars, a description of what ran, and metrics.

    A term that reads divergences also has their names and how they were computed.
    """

    loss: Tensor
    ran: str
    metrics: Mapping[str, Metric]
    divergence: str | None = None
    estimator: str | None = None


class Summand:
    """The arithmetic of terms and objectives: every result is an objective."""

    def __add__(self, other: Summand) -> Objective:
        if not isinstance(other, Summand):
            return NotImplemented
        return Objective(Objective.of(self).terms + Objective.of(other).terms)

    def __radd__(self, other: object) -> Objective:
        return Objective.of(self) if isinstance(other, int) and other == 0 else NotImplemented  # sum() begins with 0

    def __sub__(self, other: Summand) -> Objective:
        return self + -1.0 * other if isinstance(other, Summand) else NotImplemented

    def __neg__(self) -> Objective:
        return self * -1.0

    def __mul__(self, weight: float) -> Objective:
        if not isinstance(weight, (int, float)):
            return NotImplemented
        return Objective(tuple(replace(w, weight=w.weight * float(weight)) for w in Objective.of(self).terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Objective:
        return self * (1 / divisor) if isinstance(divisor, (int, float)) else NotImplemented


@dataclass(frozen=True, kw_only=True)
class Term(Checked, Summand):
    """One part of a loss. Subclasses are frozen dataclasses with a unique ``kind``.

    ``laws`` are facts about the term that the audit may rely on: "stop_gradient" (its value is not the integral of its
    gradient), "batch_local" (its normaliser is the micro-batch's own), "reinforce_on_policy" (with behaviour = current
    its gradient is REINFORCE's under its own normaliser), "zero_at_source" (identical distributions cost 0 with
    gradient 0), "inactive_at_source" (no gradient while the policy equals the source, or is within a threshold of it:
    see ``activated``). Fields are ``settings.setting``s: validated here, listed by ``earnest objectives``.
    """

    error: ClassVar[type[EarnestError]] = ObjectiveError
    kind: ClassVar[str]
    paper: ClassVar[str]
    equation: ClassVar[str]
    roles: ClassVar[tuple[Role, ...]] = ROLES
    laws: ClassVar[frozenset[str]] = frozenset()
    many_targets: ClassVar[bool] = False
    estimators: ClassVar[tuple[Estimator, ...]] = ESTIMATORS  # advantages that its definition allows
    beyond_step: ClassVar[frozenset[str]] = frozenset()  # fields that act over steps or rounds, not within one step
    twins: ClassVar[frozenset[tuple[str, str]]] = frozenset()  # modes that share a gradient by definition

    name: str | None = setting(None, "the name in reports; none: the kind. Unique within an objective")

    @property
    def label(self) -> str:
        """The name in reports; unique within an objective."""
        return self.name or self.kind

    @property
    def additive(self) -> bool:
        """Whether the loss is a sum over rows, each a function of that row's scalars and of the global counts only."""
        return True

    def signals(self) -> frozenset[Signal]:
        """The signals of the batch that this term reads; all of them are required."""
        return frozenset()

    @property
    def reference_kind(self) -> Who:
        """The policy that its reference signals come from: the base, or the previous round's."""
        return "base"

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        """The per-token scalars that this term needs from the engine."""
        raise NotImplementedError  # abstract: every concrete term defines it (tested over the registry)

    def evaluate(self, view: View) -> Value:
        """The loss of this term on its tokens."""
        raise NotImplementedError  # abstract: every concrete term defines it (tested over the registry)

    def only_exact(self) -> str | None:
        """Why the sampled estimate of its divergence would give it a wrong gradient, with the way out; or None."""
        return None

    def of_rounds(self) -> tuple[str, ...]:
        """The settings of this instance that have an effect only in a loop of several rounds (``steering``)."""
        return ()

    @classmethod
    def example(cls) -> Self:
        """An instance with the defaults. A term with required fields overrides it."""
        return cls()

    def tokens(self, batch: Batch) -> Bool[Tensor, " N"]:
        """The active tokens that this term reads, those of its roles that ``selects`` leaves; it divides by their
        counts."""
        mine, some = batch.has_role(self.roles)[batch.row], self.selects(batch)
        return mine if some is None else mine & some

    def selects(self, batch: Batch) -> Bool[Tensor, " N"] | None:
        """The active tokens of any role that this term may read; None: all of them."""
        return None

    def counts(self, batch: Batch) -> Counts:
        """What the term divides by on this whole batch, and the share of its roles' tokens and rows that it reads."""
        mine = self.tokens(batch)
        eligible = [size for role, size in zip(batch.role, batch.sizes, strict=True) if role in self.roles and size]
        found = batch.counts(mine)
        share = float(mine.sum()) / max(1, sum(eligible))
        return replace(found, coverage=share, left_out=len(eligible) - found.sequences)

    def idle(self, batch: Batch) -> str | None:
        """Why this batch legitimately has no token for the term (such as no failed row for a term of failed rows), or
        None."""
        return None if bool(self.tokens(batch).any()) else self.unfound(batch) or self.empty()

    def empty(self) -> str | None:
        """Why a batch that has rows of its roles may have no token for it; None: that is an error."""
        return None

    def unfound(self, batch: Batch) -> str | None:
        """A sentence if its rows were looked for and not found, else None. Rows not looked for are an error (check)."""
        if batch.active_roles & set(self.roles) or not set(self.roles) & set(batch.sought):
            return None
        return f"no {' or '.join(self.roles)} row was found for this batch"

    def activated(self, metrics: Mapping[str, float]) -> Self:
        """This term with its threshold, if any, lowered so that it is active at these metrics. The audit uses it while
        the term is inactive by design."""
        return self

    def initial_state(self) -> dict[str, Any]:
        """The state that the term keeps between steps and in the checkpoint (JSON); most terms have none."""
        return {}

    def advance(self, state: Mapping[str, Any], value: float, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The state after an update with this value and these metrics."""
        return dict(state)

    def next_round(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state at the beginning of a new round (a new adapter on top of frozen ones)."""
        return dict(state)

    def check(self, batch: Batch) -> str | None:
        """Raise if this batch lacks what the term needs; otherwise return why it is idle, or None.

        The engine calls it once per step, before anything is computed.
        """
        if (unfound := self.unfound(batch)) is not None:
            return unfound
        if not batch.active_roles & set(self.roles):
            present = sorted(set(batch.role))
            raise SignalError(
                f"{self.label}: needs rows with role {' or '.join(self.roles)}, the batch has {', '.join(present)}; "
                "give it such rows, or take the term out of the objective."
            )
        if batch.targets.ndim == 3 and not self.many_targets:
            raise SignalError(
                f"{self.label}: reads one target per position, the batch has {batch.targets.shape[2]} "
                f"({tuple(batch.targets.shape)}); only sft takes several."
            )
        for signal in sorted(self.signals()):
            if batch.find(signal) is None:
                raise SignalError(
                    f"{self.label}: needs the signal {signal!r}, which the batch does not have; collect the batch "
                    "with en.collect(…, objective=objective), supply it (earnest.signals), or take the term out of "
                    "the objective."
                )
            batch.check_signal(signal, f"{self.label}: the signal {signal!r}")
        if batch.truncated and "behaviour" in self.signals():
            raise SignalError(
                f"{self.label}: takes a ratio to the policy that sampled, but top_p or top_k cut that policy's tokens, "
                "so the ratio is not 1 on-policy; sample with top_p=1 and top_k=0, or take reinforce."
            )
        if "advantages" in self.signals() and batch.estimator not in (*self.estimators, "given"):
            raise SignalError(
                f"{self.label}: is defined with advantages by {' or '.join(self.estimators)}, the batch has those by "
                f"{batch.estimator!r}; collect it with en.collect(…, objective=objective), make them with "
                f"with_advantages(batch, rewards, {self.estimators[0]!r}), or take another objective."
            )
        tokens = self.tokens(batch)
        if not bool(tokens.any()):
            if (why := self.idle(batch)) is not None:
                return why
            raise SignalError(
                f"{self.label}: the batch has no active token for it; check the masks and the teacher's coverage."
            )
        if not (total := batch.weight_of(tokens)) > 0:
            raise SignalError(
                f"{self.label}: the weights of its {int(tokens.sum())} tokens sum to {total:g}, and it divides by "
                "that sum; give weights with a positive sum."
            )
        return None

    def wants(self) -> Wants:
        """The rows and signals that a batch must have for this term alone."""
        return Objective.of(self).wants()


@dataclass(frozen=True, kw_only=True)
class LogProbTerm(Term):
    """A term on the log-probs of the targets at the batch's temperature, which other policies' log-probs have, too."""

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (LogProb(batch.temperature),)


@dataclass(frozen=True)
class Weighted:
    """A term and the number that its loss is multiplied by."""

    weight: float
    term: Term


@dataclass(frozen=True)
class Evaluation:
    """An objective on a (micro-)batch: the summed loss as a graph on the scalars, and each term's own part.

    ``idle`` are the live terms that had no token here, each with the reason.
    """

    loss: Tensor
    values: Mapping[str, Value]
    idle: Mapping[str, str]


@dataclass(frozen=True)
class Objective(Summand):
    """A sum of weighted terms with unique labels."""

    terms: tuple[Weighted, ...]

    def __post_init__(self) -> None:
        labels = [w.term.label for w in self.terms]
        for label in labels:
            if labels.count(label) > 1:
                raise ObjectiveError(
                    f"two terms are called {label!r}; give one of them a name, e.g. "
                    f"{type(self.find(label)).__name__}(…, name='{label}_2')."
                )
        for w in self.terms:
            if not isinstance(w.weight, (int, float)) or w.weight != w.weight or abs(w.weight) == float("inf"):
                raise ObjectiveError(f"{w.term.label}: a weight is a finite number, got {w.weight!r}.")

    @classmethod
    def of(cls, value: Summand) -> Objective:
        if isinstance(value, Objective):
            return value
        assert isinstance(value, Term)
        return cls((Weighted(1.0, value),))

    def find(self, label: str) -> Term:
        return next(w.term for w in self.terms if w.term.label == label)

    def live(self) -> Iterator[Weighted]:
        """The terms that are computed: those whose weight is not 0."""
        return (w for w in self.terms if w.weight != 0)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Labels of the terms with weight 0: not computed; every report lists them."""
        return tuple(w.term.label for w in self.terms if w.weight == 0)

    @property
    def additive(self) -> bool:
        return all(w.term.additive for w in self.live())

    def signals(self) -> frozenset[Signal]:
        """Every signal that a live term reads."""
        return frozenset(signal for w in self.live() for signal in w.term.signals())

    def wants(self) -> Wants:
        """The rows and signals that a batch must have for the live terms.

        A term that reads any row adds no role. A batch has one reference, so all terms that read a reference must use
        the same policy.
        """
        terms = [w.term for w in self.live()]
        named = {role for term in terms if term.roles != ROLES for role in term.roles}
        kinds = {t.label: t.reference_kind for t in terms if any(s.startswith("reference.") for s in t.signals())}
        if len(set(kinds.values())) > 1:
            shown = ", ".join(f"{label}: {kind}" for label, kind in kinds.items())
            raise SignalError(
                f"the terms use different reference policies ({shown}), and a batch has one reference; "
                "give them the same one."
            )
        reads = [t.estimators for t in terms if "advantages" in t.signals()]
        allowed = tuple(e for e in ESTIMATORS if all(e in own for own in reads))
        roles: frozenset[Role] = frozenset(named) or frozenset({"rollout"})
        return Wants(roles, self.signals(), allowed, next(iter(kinds.values()), "base"), not named)

    def check(self, batch: Batch) -> dict[str, str]:
        """Raise if a live term lacks an input, or if all of them are idle; otherwise return the idle terms, each with
        the reason."""
        live = list(self.live())
        if not live:
            raise ObjectiveError(
                f"no term has a weight other than 0 ({', '.join(self.skipped) or 'there is no term'}): nothing would "
                "be trained."
            )
        reasons = {w.term.label: w.term.check(batch) for w in live}
        idle = {label: why for label, why in reasons.items() if why is not None}
        if len(idle) == len(live):
            raise NothingToTrain(idle)
        return idle

    def idle(self, batch: Batch) -> dict[str, str]:
        """The live terms for which this batch legitimately has no token, each with the reason."""
        reasons = {w.term.label: w.term.idle(batch) for w in self.live()}
        return {label: why for label, why in reasons.items() if why is not None}

    def initial_state(self) -> dict[str, dict[str, Any]]:
        return {w.term.label: w.term.initial_state() for w in self.terms}

    def prepare(
        self, batch: Batch, state: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, str], tuple[Need, ...], dict[str, Counts]]:
        """Check a whole batch before a step: its idle terms, the scalars that the others need, and what each term
        divides by. Terms that ``state`` does not have get their initial state there."""
        idle = self.check(batch)
        for label, initial in self.initial_state().items():
            state.setdefault(label, initial)
        return idle, self.needs(batch, state, idle), self.counts(batch)

    def needs(
        self, batch: Batch, state: Mapping[str, Mapping[str, Any]], idle: Container[str] = ()
    ) -> tuple[Need, ...]:
        """Every scalar that a live term needs, once, in a fixed order; ``idle`` terms need none."""
        terms = (w.term for w in self.live() if w.term.label not in idle)
        return tuple(dict.fromkeys(need for t in terms for need in t.needs(batch, state.get(t.label, {}))))

    def evaluate(
        self,
        batch: Batch,
        scalars: Scalars,
        state: Mapping[str, Mapping[str, Any]],
        counts: Mapping[str, Counts] | None = None,
    ) -> Evaluation:
        """The weighted sum over this batch.

        ``counts`` are the whole optimizer batch's, by term label, when this is a part of it.
        """
        values: dict[str, Value] = {}
        idle: dict[str, str] = {}
        total: Tensor | None = None
        for w in self.live():
            label = w.term.label
            tokens = w.term.tokens(batch)
            if not bool(tokens.any()):
                idle[label] = w.term.idle(batch) or "this part of the batch has none of its rows"
                continue
            whole = counts[label] if counts is not None else w.term.counts(batch)
            view = View.of(batch, scalars, tokens, whole, state.get(label, {}), label)
            divergence, estimator = view.computed(w.term.needs(batch, view.state))
            value = replace(w.term.evaluate(view), divergence=divergence, estimator=estimator)
            if value.loss.ndim != 0:
                raise ObjectiveError(f"{label}: a term's loss is one number, got shape {tuple(value.loss.shape)}.")
            if not bool(torch.isfinite(value.loss)):
                shown = ", ".join(f"{name} {metric.value:.4g}" for name, metric in value.metrics.items())
                raise ObjectiveError(
                    f"{label}: the loss is {float(value.loss.detach())}; look at its inputs (extreme ratios, an empty "
                    "mask): "
                    f"{shown}."
                )
            more: dict[str, Metric] = {"coverage": Max(whole.coverage), "rows_left_out": Max(float(whole.left_out))}
            values[label] = replace(value, metrics={**value.metrics, **more})
            part = value.loss * w.weight
            total = part if total is None else total + part
        if total is None:  # no live term has a row in this micro-batch: 0, with a graph, so backward works
            total = torch.stack([field.values.sum() * 0 for field in scalars.values()]).sum()
        return Evaluation(total, values, idle)

    def counts(self, batch: Batch) -> dict[str, Counts]:
        """What each live term divides by, over this (whole) batch."""
        return {w.term.label: w.term.counts(batch) for w in self.live()}

    def advance(self, state: Mapping[str, Mapping[str, Any]], values: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
        """Every term's state after an update with these values of the whole batch. The state of an idle term does not
        change."""
        after = {label: dict(own) for label, own in state.items()}
        for w in self.live():
            label = w.term.label
            if label in values:
                metrics = {name: metric.value for name, metric in values[label].metrics.items()}
                after[label] = w.term.advance(
                    state.get(label, w.term.initial_state()), float(values[label].loss.detach()), metrics
                )
        return after

    def next_round(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Every term's state at the beginning of a new round."""
        return {w.term.label: w.term.next_round(state.get(w.term.label, w.term.initial_state())) for w in self.terms}

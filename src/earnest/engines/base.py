"""The seam between maths and machines: what every engine offers, and the records that cross it.

    scalars(batch, needs)  →  objective.evaluate  →  backward(batch, derivatives)  →  update()

``step`` is the three in a row. Shapes: N active tokens, K tokens a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from earnest.adapters import Adapter
from earnest.objectives.base import Objective
from earnest.objectives.needs import Need
from earnest.objectives.view import Scalars
from earnest.signals.batch import Batch

Who = Literal["live", "base", "previous"]
"""The policy as it is; without any adapter; with frozen history but without the adapter that is trained."""


@dataclass(frozen=True)
class LogProbsWanted:
    """Exact log-probs of the targets → [N]."""

    temperature: float = 1.0


@dataclass(frozen=True)
class TopKWanted:
    """The k most probable tokens and the log of the rest's mass → ``TopK``."""

    k: int


@dataclass(frozen=True, eq=False)
class AtIdsWanted:
    """Log-probs at given token ids → [N, K]."""

    ids: Int[Tensor, "N K"]


@dataclass(frozen=True)
class HiddenWanted:
    """Last hidden states → ``Hidden``: the whole distribution at d numbers a token."""


@dataclass(frozen=True)
class LogitsWanted:
    """Every logit → ``FullLogits``; N·V numbers, for small vocabularies and for tests."""


Wanted = LogProbsWanted | TopKWanted | AtIdsWanted | HiddenWanted | LogitsWanted


@dataclass(frozen=True)
class Rollout:
    """A completion, the exact log-probs it was sampled with, and the version of the weights that gave it."""

    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    policy_version: int
    temperature: float


@dataclass(frozen=True)
class TermReport:
    """One channel in a step. ``value`` is before the weight; ``share``, on request, its part of all gradient norms.

    ``divergence`` and ``estimator`` ("exact" or "sampled") are what the function that computed the term's divergence
    returned, never the settings that asked for it; None where a term reads none.
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


@dataclass(frozen=True)
class StepReport:
    """What one step was worth, and what really ran.

    ``skipped`` have weight 0; ``idle`` are live terms that this batch gave nothing to do, each with the reason.
    """

    loss: float
    terms: Mapping[str, TermReport]
    skipped: tuple[str, ...]
    idle: Mapping[str, str]
    update: UpdateReport
    passes: str
    micro_batches: int
    tokens: int
    padded_tokens: int

    @property
    def learned_nothing(self) -> str | None:
        """Why this step had nothing to learn from, or None where it had."""
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


class Guard(Protocol):
    """Judges the step that the optimizer computed; may change the parameters in place. Its state is checkpointed.

    ``bind`` comes once, ``prepare`` between clipping and the optimizer, ``judge`` behind the optimizer. ``ablated`` is
    the policy that would be deployed.
    """

    def bind(self, adapter: Adapter, optimizer: torch.optim.Optimizer) -> None: ...

    def prepare(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None: ...

    def judge(
        self, names: Sequence[str], before: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> Mapping[str, float]: ...

    def ablated(self) -> AbstractContextManager[None]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Outer(Protocol):
    """Called after every update, guard included: where replicas meet."""

    def after_update(self, engine: Engine) -> Mapping[str, float]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Engine(Protocol):
    """Where a step runs."""

    version: int

    def scalars(self, batch: Batch, needs: Sequence[Need]) -> Scalars: ...

    def backward(self, batch: Batch, weights: Mapping[Need, Tensor]) -> None: ...

    def update(self) -> UpdateReport: ...

    def step(self, batch: Batch, objective: Objective, *, shares: bool = False) -> StepReport: ...

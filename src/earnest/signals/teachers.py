"""Teachers: policies that score a rollout with a prompt of their own.

    live           the current policy
    base           the policy with the adapter's gate at 0
    trust_region   logits (1-c)·base + c·live
    ema            the base plus an average of the adapter's ΔW over the updates (see ``signals.ema``)

A teacher reads a feedback-conditioned prompt and the student's own completion, so its rows have other lengths than the
batch's. Its distributions are aligned with the batch's active tokens. They have no gradient.
Shapes: M tokens that the teacher covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.batch import Batch, Teacher
from earnest.signals.distributions import Distribution, FullLogits, Hidden, TopK
from earnest.signals.scorer import Scorer, Who, distribution


class TeacherPolicy(Protocol):
    """Anything that scores rows: this policy, an average of it, another model, a service.

    A teacher with an attribute ``reads = "student"`` reads the student's own prompt of every row; any other reads
    feedback-conditioned prompts.
    """

    @property
    def kind(self) -> str: ...

    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> tuple[Distribution, Float[Tensor, " M"] | None]:
        """(distribution, exact log-probs of the targets or None) at every active token of ``informed``. ``informed``
        are rows of feedback-conditioned prompts, ``own`` the student's rows with the same completions."""


Scores = tuple[Distribution, None]


@dataclass(frozen=True)
class TaughtTurn:
    """A part of a row that the teacher covers: the active tokens ``first`` to ``last`` (not included) of the row, and
    the prompt that the teacher reads before them."""

    prompt: tuple[int, ...]
    first: int
    last: int


Informed = Sequence[int] | TaughtTurn
"""A feedback-conditioned prompt of a whole completion, or of a part of it."""


@dataclass(frozen=True)
class LiveTeacher:
    """The current policy."""

    kind: ClassVar[Who] = "live"

    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> Scores:
        return distribution(engine, informed, self.kind), None


@dataclass(frozen=True)
class BaseTeacher(LiveTeacher):
    """The policy with the adapter's gate at 0, which training does not change."""

    kind: ClassVar[Who] = "base"


@dataclass(frozen=True)
class TrustRegionTeacher:
    """Logits interpolated between the base and the live policy."""

    mix: float = 0.5
    """c, the live policy's share: 0 is the base, 1 the live policy."""

    kind: ClassVar[str] = "trust_region"

    def __post_init__(self) -> None:
        if not 0 <= self.mix <= 1:
            raise SignalError(f"TrustRegionTeacher: mix must lie in 0…1 (0 base, 1 live), got {self.mix!r}.")

    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> Scores:
        base, live = distribution(engine, informed, "base"), distribution(engine, informed, "live")
        head = engine.policy.head
        if isinstance(base, Hidden) and isinstance(live, Hidden):
            if head.softcap is None:  # the head is affine, so interpolated states give interpolated logits
                return Hidden(torch.lerp(base.states, live.states, self.mix)), None
            return FullLogits(torch.lerp(head.logits(base.states), head.logits(live.states), self.mix)), None
        assert isinstance(base, FullLogits) and isinstance(live, FullLogits), (
            "one engine returns the same form for both"
        )
        return FullLogits(torch.lerp(base.logits, live.logits, self.mix)), None


@torch.no_grad()
def with_teacher(
    engine: Scorer, batch: Batch, prompts: Sequence[Informed | None] | None, teacher: TeacherPolicy | None = None
) -> Batch:
    """The batch with a teacher on the rows that have a feedback-conditioned prompt (token ids, or a ``TaughtTurn``; one
    entry per row; None: no feedback).

    If no row has one, the teacher covers no token, and the terms that read it are idle. ``prompts`` None: the teacher
    reads the student's own prompt of every row.
    """
    teacher = LiveTeacher() if teacher is None else teacher
    if prompts is None:
        found, exact = teacher.teach(engine, batch, batch)
        return batch.with_signals(teacher=Teacher(found, None, teacher.kind, exact))
    if len(prompts) != len(batch):
        raise SignalError(
            f"need a feedback-conditioned prompt or None for each of {len(batch)} rows, got {len(prompts)}."
        )
    given = {r: prompt for r, prompt in enumerate(prompts) if prompt is not None}
    at = torch.cat([batch.tokens_of([]), *(_covered(batch, r, prompt) for r, prompt in given.items())])
    if not len(at):
        nothing = TopK(at.new_zeros(0, 1), torch.zeros(0, 1, device=batch.device), torch.zeros(0, device=batch.device))
        return batch.with_signals(teacher=Teacher(nothing, at, teacher.kind))
    own = batch.rows(list(given))
    if any(isinstance(prompt, TaughtTurn) for prompt in given.values()):
        own = informed_rows(batch, {r: _own(batch, r, prompt) for r, prompt in given.items()})
    found, exact = teacher.teach(engine, informed_rows(batch, given), own)
    return batch.with_signals(teacher=Teacher(found, at, teacher.kind, exact))


def _covered(batch: Batch, row: int, prompt: Informed) -> Int[Tensor, " n"]:
    """The row's active tokens that the teacher covers."""
    tokens = batch.tokens_of([row])
    return tokens[prompt.first : prompt.last] if isinstance(prompt, TaughtTurn) else tokens


def _own(batch: Batch, row: int, prompt: Informed) -> Informed:
    """The student's own tokens in place of the teacher's prompt."""
    start = int(batch.position[_covered(batch, row, prompt)[0]])
    own = tuple(batch.inputs[row, : start + 1].tolist())
    return TaughtTurn(own, prompt.first, prompt.last) if isinstance(prompt, TaughtTurn) else own


def informed_rows(batch: Batch, prompts: Mapping[int, Informed]) -> Batch:
    """The given rows, or parts of them, with other prompts and their own completions; the same tokens are active."""
    completions: list[list[int]] = []
    weights: list[Float[Tensor, " n"]] = []
    read: list[Sequence[int]] = []
    for r, prompt in prompts.items():
        read.append(prompt.prompt if isinstance(prompt, TaughtTurn) else prompt)
        if not read[-1]:
            raise SignalError(f"row {r}: its feedback-conditioned prompt is empty; give None for a row without one.")
        places = batch.position[_covered(batch, r, prompt)]
        start, end = int(places[0]), batch.lengths[r]
        if isinstance(prompt, TaughtTurn):
            end = int(places[-1]) + 1
        completions.append(batch.targets[r, start:end].tolist())
        weights.append(batch.weight[r, start:end])
    made = Batch.from_rows(read, completions, temperature=batch.temperature, device=batch.device)
    weight = torch.zeros_like(made.weight)
    for i, (prompt, own) in enumerate(zip(read, weights, strict=True)):
        weight[i, len(prompt) - 1 : len(prompt) - 1 + len(own)] = own
    return made.with_signals(weight=weight)

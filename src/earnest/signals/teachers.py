"""Teachers: who judges a rollout after reading a prompt of its own.

    live           the policy itself, as it is now
    base           the policy with the adapter's gate at 0
    trust_region   logits (1-c)·base + c·live
    ema            the base plus an average of the adapter's ΔW over the updates (see ``signals.ema``)

A teacher reads the told prompt and the student's own completion, so its rows have other lengths than the batch's;
what comes back is laid on the batch's active tokens. It has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.batch import Batch, Teacher
from earnest.signals.distributions import Distribution, FullLogits, Hidden
from earnest.signals.scorer import Scorer, distribution

TEACHERS = ("live", "base", "ema", "trust_region")


class TeacherPolicy(Protocol):
    """Anything that turns rows into distributions."""

    @property
    def kind(self) -> str: ...

    def distribution(self, engine: Scorer, batch: Batch) -> Distribution: ...


@dataclass(frozen=True)
class LiveTeacher:
    """The policy as it is now."""

    kind: ClassVar[str] = "live"

    def distribution(self, engine: Scorer, batch: Batch) -> Distribution:
        return distribution(engine, batch, "live")


@dataclass(frozen=True)
class BaseTeacher:
    """The policy with the adapter's gate at 0: it never moves."""

    kind: ClassVar[str] = "base"

    def distribution(self, engine: Scorer, batch: Batch) -> Distribution:
        return distribution(engine, batch, "base")


@dataclass(frozen=True)
class TrustRegionTeacher:
    """Logits between the base and the live policy: a teacher that follows, but not all the way."""

    mix: float = 0.5
    """c, the live policy's share: 0 is the base, 1 the live policy."""

    kind: ClassVar[str] = "trust_region"

    def __post_init__(self) -> None:
        if not 0 <= self.mix <= 1:
            raise SignalError(f"TrustRegionTeacher: mix must lie in 0…1 (0 base, 1 live), got {self.mix!r}.")

    def distribution(self, engine: Scorer, batch: Batch) -> Distribution:
        base, live = distribution(engine, batch, "base"), distribution(engine, batch, "live")
        head = engine.policy.head
        if isinstance(base, Hidden) and isinstance(live, Hidden):
            if head.softcap is None:  # the head is affine, so mixed states have mixed logits
                return Hidden(torch.lerp(base.states, live.states, self.mix))
            return FullLogits(torch.lerp(head.logits(base.states), head.logits(live.states), self.mix))
        assert isinstance(base, FullLogits) and isinstance(live, FullLogits), "one engine answers both alike"
        return FullLogits(torch.lerp(base.logits, live.logits, self.mix))


@torch.no_grad()
def with_teacher(
    engine: Scorer, batch: Batch, told: Sequence[Sequence[int] | None], teacher: TeacherPolicy | None = None
) -> Batch:
    """The batch with a teacher on the rows that have a told prompt (token ids, one entry a row; None: no lesson).

    Where no row has one the teacher covers nothing, and the terms that need it say so and stay idle.
    """
    teacher = LiveTeacher() if teacher is None else teacher
    if len(told) != len(batch):
        raise SignalError(f"need a told prompt or None for each of {len(batch)} rows, got {len(told)}.")
    rows = [r for r, prompt in enumerate(told) if prompt is not None]
    at = torch.cat([_tokens(batch, r) for r in rows]) if rows else torch.empty(0, dtype=torch.long, device=batch.device)
    if not rows:
        width = engine.policy.head.weight.shape[1]
        nothing = torch.empty(0, width, dtype=engine.policy.head.weight.dtype, device=batch.device)
        return batch.with_signals(teacher=Teacher(Hidden(nothing), at, teacher.kind))
    found = teacher.distribution(engine, _told_rows(batch, rows, [told[r] or () for r in rows]))
    return batch.with_signals(teacher=Teacher(found, at, teacher.kind))


def _tokens(batch: Batch, row: int) -> Int[Tensor, " n"]:
    return (batch.row == row).nonzero()[:, 0]


def _told_rows(batch: Batch, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Batch:
    """The told prompts with the rows' own completions; the same completion tokens are active, holes included."""
    completions: list[list[int]] = []
    weights: list[Float[Tensor, " n"]] = []
    for r, prompt in zip(rows, prompts, strict=True):
        if not prompt:
            raise SignalError(f"row {r}: its told prompt is empty; give None where there is no lesson.")
        start, end = int(batch.position[_tokens(batch, r)[0]]), int(batch.length[r])
        completions.append(batch.targets[r, start:end].tolist())
        weights.append(batch.weight[r, start:end])
    made = Batch.from_rows(prompts, completions, temperature=batch.temperature, device=batch.device)
    weight = torch.zeros_like(made.weight)
    for i, (prompt, own) in enumerate(zip(prompts, weights, strict=True)):
        weight[i, len(prompt) - 1 : len(prompt) - 1 + len(own)] = own
    return made.with_signals(weight=weight)

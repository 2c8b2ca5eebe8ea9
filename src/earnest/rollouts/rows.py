"""Rows of a batch: rollouts, demonstrations of a task's right answers, preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from earnest.errors import ConfigError
from earnest.models.protocol import PolicyLike
from earnest.models.replies import reply_tokens
from earnest.rollouts.attempts import Attempt
from earnest.rollouts.rollout import Rollout
from earnest.signals import Batch, Role, pairs_of
from earnest.tasks import Prompt, Task


@dataclass(frozen=True)
class Row:
    """A prompt and a completion in tokens.

    ``logprobs`` are None if the completion was not sampled. A batch with rollouts then has 0 there, which no term
    reads. ``weights`` are None where every token of the completion is trained; a token of weight 0 is not.
    """

    role: Role
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    group: int
    policy_version: int
    logprobs: tuple[float, ...] | None = None
    correct: bool = False
    pair: int = -1
    weights: tuple[float, ...] | None = None

    @property
    def active(self) -> int:
        """The number of tokens that are trained."""
        return len(self.tokens) if self.weights is None else sum(w != 0 for w in self.weights)


def batch_of(rollouts: Sequence[Rollout], **options: Any) -> Batch:
    """The rollouts' tokens, groups, exact behaviour log-probs and policy versions; no advantages yet."""
    return stack([rollout_row(r) for r in rollouts], temperature=rollouts[0].temperature, **options)


def stack(rows: Sequence[Row], **options: Any) -> Batch:
    """The rows as a batch; ``options`` go to ``Batch.from_rows``."""
    sampled = any(row.role == "rollout" for row in rows)
    return Batch.from_rows(
        [row.prompt for row in rows],
        [row.tokens for row in rows],
        role=[row.role for row in rows],
        group=[row.group for row in rows],
        pair=[row.pair for row in rows],
        policy_version=[row.policy_version for row in rows],
        behaviour=[row.logprobs or (0.0,) * row.active for row in rows] if sampled else None,
        correct=[row.correct for row in rows],
        weights=[row.weights for row in rows],
        **options,
    )


def rollout_row(rollout: Rollout, correct: bool = False) -> Row:
    r = rollout
    return Row("rollout", r.prompt, r.tokens, r.prompt_index, r.policy_version, r.logprobs, correct)


def pairs_among(attempts: Sequence[Attempt], version: int, group: int) -> list[Row]:
    """Chosen and rejected rows in turn: the best and the worst completion of each prompt whose rewards differ."""
    couples = pairs_of([a.grade.reward for a in attempts], [a.rollout.prompt_index for a in attempts])
    rows: list[Row] = []
    for number, couple in enumerate(couples):
        for role, a in zip(("chosen", "rejected"), (attempts[i] for i in couple), strict=True):
            own = (a.rollout.prompt, a.rollout.tokens, group + len(rows), version, a.rollout.logprobs, a.grade.correct)
            rows.append(Row(role, *own, pair=number))  # type: ignore[arg-type]
    return rows


def demonstration(policy: PolicyLike, task: Task, prompt: Prompt, version: int, group: int) -> Row:
    """The task's right answer to a prompt."""
    asked, answer = demonstrate(policy, task, prompt)
    return Row("demonstration", tuple(asked), tuple(answer), group, version, correct=True)


def demonstrate(policy: PolicyLike, task: Task, prompt: Prompt) -> tuple[list[int], list[int]]:
    """(prompt, right answer) in tokens; the answer ends its turn. Raises if the task's grader rejects the answer."""
    answer = prompt.data.get("answer")
    if answer is None:
        raise ConfigError(
            f"task: {task.name} has no right answers to demonstrate (its prompts carry no data['answer']); "
            "use a task with answers, or an objective on rollouts."
        )
    if not task.grade(prompt, str(answer)).correct:
        raise ConfigError(
            f"task: the grader of {task.name} rejects its own answer {answer!r} to prompt {prompt.id}; correct the "
            "task's answer or its grader."
        )
    return reply_tokens(policy, prompt.messages, str(answer))

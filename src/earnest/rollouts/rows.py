"""Rows of a batch: rollouts and conversations, demonstrations of a task's right answers, preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from earnest.errors import ConfigError, SignalError
from earnest.models.protocol import PolicyLike
from earnest.models.replies import message_tokens, reply_tokens
from earnest.rollouts.attempts import Attempt
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Segments, Trajectory
from earnest.signals import Batch, Role, pairs_of
from earnest.tasks import Environment, Message, Prompt, Task, is_environment
from earnest.tasks.playing import demonstration as solve
from earnest.tasks.playing import run_to_end


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
    return stack([row for r in rollouts for row in rollout_rows(r)], temperature=rollouts[0].temperature, **options)


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


def segments_row(segments: Segments, group: int, correct: bool = False) -> Row:
    """A row of a rollout or conversation: what the policy sampled is trained, other tokens have weight 0."""
    sampled = [i for i, segment in enumerate(segments) if segment.author == "policy"]
    first, last = sampled[0], sampled[-1] + 1
    completion = segments[first:last]
    policy = [segments[i] for i in sampled]
    weights = tuple(float(s.author == "policy") for s in completion for _ in s.tokens)
    return Row(
        "rollout",
        tuple(token for s in segments[:first] for token in s.tokens),
        tuple(token for s in completion for token in s.tokens),
        group,
        min(s.policy_version for s in policy if s.policy_version is not None),
        tuple(value for s in policy for value in s.logprobs or ()),
        correct,
        weights=None if all(weights) else weights,
    )


def rollout_rows(rollout: Rollout | Trajectory, correct: bool = False) -> list[Row]:
    """One row for each list of segments."""
    return [segments_row(segments, rollout.prompt_index, correct) for segments in rollout.rows]


def pairs_among(attempts: Sequence[Attempt], version: int, group: int) -> list[Row]:
    """Chosen and rejected rows in turn: the best and the worst completion of each prompt whose rewards differ."""
    couples = pairs_of([a.grade.reward for a in attempts], [a.rollout.prompt_index for a in attempts])
    roles: tuple[Role, Role] = ("chosen", "rejected")
    rows: list[Row] = []
    for number, couple in enumerate(couples):
        for role, a in zip(roles, (attempts[i] for i in couple), strict=True):
            own = rollout_rows(a.rollout, a.grade.correct)
            if len(own) > 1:
                raise SignalError(
                    "the chat template rewrites earlier turns, so a conversation has several rows and is no answer of "
                    "a preference pair; use a chat template that keeps them, or leave out the terms on pairs."
                )
            rows.append(replace(own[0], role=role, group=group + len(rows), policy_version=version, pair=number))
    return rows


def demonstration(policy: PolicyLike, task: Task | Environment, prompt: Prompt, version: int, group: int) -> Row:
    """The task's right answer to a prompt, or the conversation in which an environment's oracle solves it."""
    if is_environment(task):
        return _solved(policy, task, prompt, version, group)
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


def _solved(policy: PolicyLike, environment: Environment, prompt: Prompt, version: int, group: int) -> Row:
    """A conversation in which the environment's ``oracle`` solves the prompt."""
    oracle = getattr(environment, "oracle", None)
    if oracle is None:
        raise ConfigError(
            f"task: {environment.name} has conversations and no right answers to demonstrate: it has no oracle; give "
            "them as rows of messages with data: FILE."
        )
    messages = run_to_end(solve(environment, prompt, oracle))["messages"]
    return conversation_row(policy, environment, messages, version, group, correct=True)


def conversation_row(
    policy: PolicyLike,
    environment: Environment,
    messages: Sequence[Message],
    version: int,
    group: int,
    *,
    correct: bool = False,
) -> Row:
    """A conversation to learn from: the assistant's messages have weight 1, what it read has weight 0."""
    tokens: list[int] = []
    weights: list[float] = []
    start = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, reply = message_tokens(policy, messages[:number], message, environment.tools or None)
        start = start or len(asked)
        if asked[start : start + len(tokens)] != tokens:
            raise ConfigError(
                f"model: the chat template of {policy.name} rewrites earlier turns, so a conversation is not one row; "
                "use a chat template that keeps them."
            )
        read = asked[start + len(tokens) :]
        weights += [0.0] * len(read) + [1.0] * len(reply)
        tokens += [*read, *reply]
        opening = asked[:start]
    return Row("demonstration", tuple(opening), tuple(tokens), group, version, correct=correct, weights=tuple(weights))

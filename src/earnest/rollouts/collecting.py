"""From prompts to a batch: the same code for ``en.collect`` and for every step of a run.

    prompts ─► n completions or conversations each ─► grades ─► rows ─► advantages ─► reference and teacher ─► Batch

The batch has the rows and signals that the live terms of the objective read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from earnest.data import hinted, reprompt
from earnest.errors import SignalError
from earnest.models import SampleSpec
from earnest.models.protocol import PolicyLike
from earnest.rollouts.attempts import Attempt, Sample, describe
from earnest.rollouts.conversing import Conversations, Source, TurnSettings, converse
from earnest.rollouts.credit import check_exact, with_turn_advantages
from earnest.rollouts.rows import Row, demonstration, pairs_among, rollout_rows, stack
from earnest.rollouts.trajectory import Trajectory
from earnest.signals import Batch, TeacherPolicy, Wants, lessons, with_advantages, with_reference, with_teacher
from earnest.signals.advantages import Estimator
from earnest.signals.teachers import Informed, TaughtTurn
from earnest.signals.wants import Wanting
from earnest.tasks import Environment, Grade, Prompt, Task, grade_all, is_environment
from earnest.tasks.grading import DEFAULT_MAX_ERROR_SHARE


@dataclass(frozen=True)
class Rollouts:
    """A batch with every signal that its objective reads, and the graded rollouts that are its first rows."""

    batch: Batch
    attempts: tuple[Attempt, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    taught: tuple[tuple[Informed | None, ...], ...] = ()
    """For each attempt, what the self-teacher read and covered in each of its rows; empty without such a teacher."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(a.prompt for a in self.attempts)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(a.text for a in self.attempts)

    @property
    def grades(self) -> tuple[Grade, ...]:
        return tuple(a.grade for a in self.attempts)

    def __repr__(self) -> str:
        return f"Rollouts({len(self.attempts)} rollouts, reward {self.reward:.3f}, batch={self.batch!r})"

    @property
    def reward(self) -> float:
        """The mean reward; nan if the objective reads no rollouts."""
        rewards = [a.grade.reward for a in self.attempts]
        return sum(rewards) / len(rewards) if rewards else float("nan")


def collect(
    engine: Source,
    task: Task | Environment | None,
    prompts: Sequence[Prompt],
    n: int,
    spec: SampleSpec | None = None,
    *,
    objective: Wanting | None = None,
    estimator: Estimator | None = None,
    teacher: TeacherPolicy | None = None,
    given: Sequence[Row] = (),
    sample: Sample | None = None,
    turns: TurnSettings | None = None,
    made: Conversations | None = None,
    max_grader_errors: float = DEFAULT_MAX_ERROR_SHARE,
) -> Rollouts:
    """``n`` graded completions of every prompt as a batch, with every signal that ``objective`` reads.

    With an environment as ``task`` they are conversations, and ``turns`` has their settings.

    An objective that reads demonstrations gets those among the rows ``given``, or without them the task's right
    answers; one that reads preference pairs gets those given, or without them the best over the worst completion of
    every prompt. Without ``objective`` the batch has rollouts with advantages. ``task`` may be None where all rows are
    given. ``estimator`` makes the advantages; None: the first that every term's definition allows.
    ``teacher``: None is the policy itself. ``sample`` replaces the engine's sampler;
    ``made`` are completions of the prompts that were sampled and graded before.
    """
    turns = turns or TurnSettings()
    wants = Wants() if objective is None else objective.wants()
    spec, policy, version = spec or SampleSpec(), engine.policy, engine.version
    sought = wants.roles - {row.role for row in given}  # what the task has to give
    if task is None and given and wants.any_row:
        sought = frozenset()
    paired = {"chosen", "rejected"} <= sought  # given rows may be of one role only: judged answers are no pairs
    found = Conversations([], {})
    if ("rollout" in sought or paired) and made is not None:
        found = made
    elif "rollout" in sought or paired:
        found = graded(
            engine, _required(task), prompts, n, spec, turns, sample=sample, max_grader_errors=max_grader_errors
        )
    attempts = found.attempts
    rows: list[Row] = [row for a in attempts for row in rollout_rows(a.rollout, a.grade.correct)]
    group = len(prompts)  # after the groups of the rollouts
    if "demonstration" in sought:
        task = _required(task)
        rows += [demonstration(policy, task, p, version, group + i) for i, p in enumerate(prompts)]
        group += len(prompts)
    if paired:
        rows += pairs_among(attempts, version, group)
    rows += [replace(row, group=group + i, policy_version=version) for i, row in enumerate(given)]
    if not rows:
        raise SignalError("a batch needs at least one prompt; none was given.")
    batch = stack(
        rows,
        temperature=(spec.temperature or 1.0) if attempts or not given else 1.0,
        max_length=turns.longest(policy, spec) if is_environment(task) else spec.max_new_tokens,
        pad=policy.pad_id,
        device=policy.device,
        sought=tuple(sorted(wants.roles)),
        truncated=bool(attempts) and (spec.top_p < 1 or spec.top_k > 0),
    )
    metrics = describe(attempts)
    if is_environment(task) and attempts:
        check_exact(batch, attempts, found.drawn)
    if attempts and (n > 1 or "advantages" in wants.signals or objective is None):
        chosen = estimator or _first(wants)
        if is_environment(task):
            batch, alone = with_turn_advantages(batch, attempts, chosen, turns)
            metrics["turns_not_compared"] = float(alone)
        else:
            batch = with_advantages(batch, [a.grade.reward for a in attempts], chosen)
    taught: tuple[tuple[Informed | None, ...], ...] = ()
    if objective is not None:
        batch = with_reference(engine, batch, wants)
        if "teacher" in wants.signals:
            tools = task.tools if is_environment(task) else ()
            own = getattr(teacher, "reads", "feedback") == "student"
            seen = None if own else teacher_prompts(policy, attempts, len(batch), tools, turns)
            batch = with_teacher(engine, batch, seen, teacher)
            each = iter(seen or ())
            taught = () if seen is None else tuple(tuple(next(each) for _ in a.rollout.rows) for a in attempts)
            if seen is not None and is_environment(task):
                parts = [part for part in seen if isinstance(part, TaughtTurn)]
                metrics["hinted_turns"] = float(len(parts))
                metrics["hinted_tokens"] = float(sum(part.last - part.first for part in parts))
    return Rollouts(batch, tuple(attempts), metrics, taught)


def graded(
    engine: Source,
    task: Task | Environment,
    prompts: Sequence[Prompt],
    n: int,
    spec: SampleSpec,
    turns: TurnSettings,
    *,
    sample: Sample | None = None,
    max_grader_errors: float = DEFAULT_MAX_ERROR_SHARE,
) -> Conversations:
    """``n`` graded completions of every prompt, or conversations if the task is an environment, prompt by prompt."""
    if is_environment(task):
        return converse(engine, task, prompts, n, spec, turns, sample=sample, max_errors=max_grader_errors)
    policy = engine.policy
    rollouts = (sample or engine.sample)([policy.render(p.messages) for p in prompts], n, spec)
    repeated = [prompts[r.prompt_index] for r in rollouts]
    texts = [policy.decode(r.tokens) for r in rollouts]
    grades = grade_all(task, repeated, texts, max_grader_errors)
    return Conversations([Attempt(*parts) for parts in zip(repeated, rollouts, texts, grades, strict=True)], {})


def _required(task: Task | Environment | None) -> Task | Environment:
    if task is None:
        raise SignalError("the objective reads rows of a task, and there is none; give a task, or all rows.")
    return task


def _first(wants: Wants) -> Estimator:
    if not wants.estimators:
        raise SignalError(
            "the terms of the objective are defined with different advantages, and a batch carries one kind; "
            "give estimator=…, or train the terms on batches of their own."
        )
    return wants.estimators[0]


def teacher_prompts(
    policy: PolicyLike,
    attempts: Sequence[Attempt],
    rows: int,
    tools: Sequence[Mapping[str, Any]] = (),
    turns: TurnSettings | None = None,
) -> list[Informed | None]:
    """The feedback-conditioned prompt of the self-teacher for each of ``rows`` rows: with another completion's success
    and the grader's feedback, or None if there is neither.

    Rollouts are the batch's first rows; the others (demonstrations, pairs) have no teacher. A conversation of several
    rows has a prompt for each, from the messages that the row begins with. A conversation whose grade marks a turn has
    a teacher for that turn alone (or from it on), which reads the messages before it with the feedback as a hint.
    """
    made = lessons(
        [a.text for a in attempts],
        [a.grade.correct for a in attempts],
        [a.grade.feedback for a in attempts],
        [a.rollout.prompt_index for a in attempts],
    )
    found: list[Informed | None] = []
    for a, lesson in zip(attempts, made, strict=True):
        if isinstance(a.rollout, Trajectory) and a.grade.turn is not None and a.grade.feedback.strip():
            found += _hinted_rows(policy, a.rollout, a.grade.turn, a.grade.feedback, tools, turns or TurnSettings())
            continue
        histories = a.rollout.histories if isinstance(a.rollout, Trajectory) else (a.prompt.messages,)
        found += [
            None
            if lesson is None
            else policy.render(reprompt(messages, lesson.solution, lesson.feedback), tools=tools or None)
            for messages in histories
        ]
    return found + [None] * (rows - len(found))


def _hinted_rows(
    policy: PolicyLike,
    rollout: Trajectory,
    turn: int,
    feedback: str,
    tools: Sequence[Mapping[str, Any]],
    turns: TurnSettings,
) -> list[Informed | None]:
    """For each row of a conversation: what the teacher of the turn that failed covers and reads, or None."""
    opening = len(rollout.histories[0])
    places = [i for i, m in enumerate(rollout.messages) if i >= opening and m.get("role") == "assistant"]
    before = hinted(rollout.messages[: places[turn]], feedback, turns.hint)
    prompt = tuple(policy.render(before, tools=tools or None))
    found: list[Informed | None] = []
    number = 0
    for row in rollout.rows:
        taught: TaughtTurn | None = None
        active = 0
        whole = sum(len(segment.tokens) for segment in row if segment.author == "policy")
        for segment in row:
            if segment.author == "policy":
                if number == turn:
                    end = whole if turns.teach == "onward" else active + len(segment.tokens)
                    taught = TaughtTurn(prompt, active, end)
                active += len(segment.tokens)
                number += 1
        found.append(taught)
    return found

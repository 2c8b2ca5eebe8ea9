"""The signals that only an engine can supply: what the objective's live terms ask for, and nothing else."""

from __future__ import annotations

from typing import Any, cast

from earnest.data import reprompt
from earnest.engines.tinker.teach import Teaching
from earnest.runs.collect import Collected
from earnest.runs.setup import Setup
from earnest.signals import Batch, lessons, with_reference, with_teacher
from earnest.signals.reference import wanted_signals


def with_signals(setup: Setup, collected: Collected) -> Batch:
    """The batch with references, the trainer's own log-probs and a teacher, where a live term reads them.

    A signal that is still missing is reported by the objective's check, with the term's name.
    """
    batch = with_reference(setup.engine, collected.batch, setup.objective)
    if "teacher" in wanted_signals(setup.objective) and batch.teacher is None:
        told = told_prompts(setup, collected)
        if isinstance(setup.teacher, Teaching):  # a Tinker service is asked in its own way
            return setup.teacher.teach(cast(Any, setup.engine), batch, told)
        batch = with_teacher(setup.engine, batch, told, setup.teacher)
    return batch


def told_prompts(setup: Setup, collected: Collected) -> list[list[int] | None]:
    """For each row the prompt of its self-teacher: told a sibling's success and the grader's feedback, or None.

    Rollouts are the batch's first rows; the others (demonstrations, pairs) are taught by nobody.
    """
    attempts = collected.attempts
    made = lessons(
        [a.text for a in attempts],
        [a.grade.correct for a in attempts],
        [a.grade.feedback for a in attempts],
        [a.rollout.prompt_index for a in attempts],
    )
    told: list[list[int] | None] = [
        None if lesson is None else setup.policy.render(reprompt(a.prompt.messages, lesson.solution, lesson.feedback))
        for a, lesson in zip(attempts, made, strict=True)
    ]
    return told + [None] * (len(collected.batch) - len(attempts))

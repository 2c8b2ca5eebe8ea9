"""Grade many rollouts; a grader that raises is reported, worth 0, and stops the run past a set share."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from earnest.tasks.base import Grade, Prompt, Task, TaskError

_log = logging.getLogger(__name__)
DEFAULT_MAX_ERROR_SHARE = 0.1


class GraderErrors(TaskError):
    """Too large a share of a task's gradings raised."""


def _grade_one(task: Task, prompt: Prompt, completion: str) -> Grade:
    grade = task.grade(prompt, completion)
    if not math.isfinite(grade.reward):
        raise ValueError(f"the reward is {grade.reward}")
    return grade


def grade_all(
    task: Task, prompts: Sequence[Prompt], completions: Sequence[str], max_error_share: float = DEFAULT_MAX_ERROR_SHARE
) -> list[Grade]:
    """The grade of each completion, in order.

    A grading that raises (or rewards with a non-finite number) is logged with its prompt, counts as reward 0 and has
    its error in ``extras["error"]``. When more than ``max_error_share`` of the gradings raise, ``GraderErrors``
    ends the run.
    """
    if len(prompts) != len(completions):
        raise TaskError(
            f"{len(prompts)} prompts but {len(completions)} completions: give one prompt for each completion."
        )
    if not 0.0 <= max_error_share <= 1.0:
        raise TaskError(f"max_error_share={max_error_share}: give a share between 0 and 1.")
    grades: list[Grade] = []
    failed: list[tuple[Prompt, Exception]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        try:
            grades.append(_grade_one(task, prompt, completion))
        except Exception as error:  # a grader is foreign code: whatever it raises is a finding about it, not about us
            _log.warning("the grader of %s raised %r on prompt %s %s", task.name, error, prompt.id, _shown(prompt))
            failed.append((prompt, error))
            grades.append(Grade(0.0, "", False, {"error": f"{type(error).__name__}: {error}"}))
    if len(failed) > max_error_share * len(prompts):
        prompt, first = failed[0]
        raise GraderErrors(
            f"the grader of {task.name} raised on {len(failed)} of {len(prompts)} completions, more than the "
            f"allowed share of {max_error_share:g}; first {type(first).__name__}: {first}, on prompt "
            f"{prompt.id} {_shown(prompt)}. "
            "Mend the grader, or raise max_error_share."
        ) from first
    return grades


def _shown(prompt: Prompt) -> str:
    text = str(prompt.messages[-1].get("content")) if prompt.messages else ""
    return repr(text if len(text) <= 200 else text[:200] + "…")

"""Grade many rollouts at the same time, each with a time limit.

The user's own functions and classes run in processes (``processes``), so the limit holds for any code. Built-in
graders and tasks without a pickled form run in threads; there the limit holds for code that does not keep the
interpreter's lock.

An error of the grader, a timeout or a reward that is not finite is logged and gives reward 0. Too large a share of them
ends the run.
"""

from __future__ import annotations

import logging
import math
import numbers
import pickle
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from earnest.tasks.base import Grade, Prompt, Task, TaskError
from earnest.tasks.model_graders import BudgetSpent
from earnest.tasks.processes import CLOCK, IMPORTED, LONGEST_LOAD, GradingTimeout, Isolated, isolated, raised_at

_log = logging.getLogger(__name__)
DEFAULT_MAX_ERROR_SHARE = 0.1
TIME_LIMIT = 60.0
"""Seconds that the grading of one completion may take."""
THREADS = 8
"""Gradings at the same time."""


class GraderErrors(TaskError):
    """Too large a share of a task's gradings raised."""


def _grader(task: Task, prompts: Sequence[Prompt]) -> tuple[Callable[[Prompt, str], object], bool]:
    """The task's grade function, and whether it runs in worker processes: that of a class in the user's own file does,
    if the task and its prompts have a pickled form."""
    if getattr(task, "isolated", False):
        return task.grade, True
    if type(task).__module__.startswith(IMPORTED) and prompts:
        with suppress(Exception):  # pickling calls the user's code
            pickle.dumps(prompts[0])
            run = isolated(task.grade)
            return run, isinstance(run, Isolated)
    return task.grade, False


def _grade_one(grade: Callable[[Prompt, str], object], prompt: Prompt, completion: str) -> Grade:
    found = grade(prompt, completion)
    if not isinstance(found, Grade):
        raise TypeError(f"the grader returned {found!r}, a {type(found).__name__}, and not a Grade")
    reward: object = found.reward
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"the reward is {reward!r}, a {type(reward).__name__}, and not a number")
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return found


def grade_all(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    max_error_share: float = DEFAULT_MAX_ERROR_SHARE,
    time_limit: float = TIME_LIMIT,
) -> list[Grade]:
    """The grade of each completion, in order.

    A grading that raises, returns no finite reward, or takes longer than ``time_limit`` seconds counts as reward 0 and
    has its error in ``extras["error"]``. Each distinct error is logged once, with its count, its place in the user's
    code and one of its prompts. When more than ``max_error_share`` of the gradings raise, ``GraderErrors`` ends the
    run.
    """
    if len(prompts) != len(completions):
        raise TaskError(
            f"{len(prompts)} prompts but {len(completions)} completions: give one prompt for each completion."
        )
    if not 0.0 <= max_error_share <= 1.0:
        raise TaskError(f"max_error_share={max_error_share}: give a share between 0 and 1.")
    grades: list[Grade] = []
    failed: list[tuple[Prompt, Exception]] = []
    for prompt, found in zip(prompts, outcomes(task, prompts, completions, time_limit), strict=True):
        if isinstance(found, Grade):
            grades.append(found)
            continue
        if isinstance(found, BudgetSpent):
            raise found
        failed.append((prompt, found))
        grades.append(Grade(0.0, "", False, {"error": f"{type(found).__name__}: {found}"}))
    for line in _distinct(failed, len(prompts)):
        _log.warning("the grader of %s raised %s", task.name, line)
    if len(failed) > max_error_share * len(prompts):
        prompt, first = failed[0]
        raise GraderErrors(
            f"the grader of {task.name} raised on {len(failed)} of {len(prompts)} completions, more than the "
            f"allowed share of {max_error_share:g}; first {type(first).__name__}: {first}, on prompt "
            f"{prompt.id} {_shown(prompt)}{raised_at(first)}. "
            "Fix the grader, or raise max_grader_errors."
        ) from first
    return grades


def _distinct(failed: Sequence[tuple[Prompt, Exception]], of: int) -> list[str]:
    """One line for each distinct error: the same type, raised at the same place of the user's code (or, where no place
    is known, with the same text)."""
    same: dict[tuple[str, str], list[tuple[Prompt, Exception]]] = defaultdict(list)
    for prompt, error in failed:
        same[type(error).__name__, raised_at(error) or str(error)].append((prompt, error))
    return [
        f"{error!r}{raised_at(error)} on {len(all_of_it)} of {of} completions, for example on prompt {prompt.id} "
        f"{_shown(prompt)}"
        for all_of_it in same.values()
        for prompt, error in all_of_it[:1]
    ]


def outcomes(
    task: Task, prompts: Sequence[Prompt], completions: Sequence[str], time_limit: float = TIME_LIMIT
) -> list[Grade | Exception]:
    """The grade of each completion, or what went wrong with it, in order. Gradings run in daemon threads. One that
    takes too long is abandoned: its thread goes on without being waited for, and another takes its place."""
    grade, elsewhere = _grader(task, prompts)
    found: dict[int, Grade | Exception] = {}
    waiting = iter(range(len(prompts)))
    done: queue.SimpleQueue[tuple[int, Grade | Exception]] = queue.SimpleQueue()
    started: dict[int, float] = {}

    def work(first: int) -> None:
        CLOCK.limit = time_limit
        CLOCK.begin = lambda: started.update({first: time.monotonic()}) if first in started else None
        try:
            done.put((first, _grade_one(grade, prompts[first], completions[first])))
        except Exception as error:  # a grader is foreign code: whatever it raises is a finding about it, not about us
            done.put((first, error))

    def start() -> None:
        index = next(waiting, None)
        if index is not None:
            started[index] = time.monotonic() + (LONGEST_LOAD if elsewhere else 0.0)
            threading.Thread(target=work, args=(index,), name=f"grader {task.name}", daemon=True).start()

    for _ in range(THREADS):
        start()
    while len(found) < len(prompts):
        oldest = min(started, key=started.__getitem__)
        try:
            index, result = done.get(timeout=max(0.0, started[oldest] + time_limit - time.monotonic()))
        except queue.Empty:
            if started[oldest] + time_limit > time.monotonic():  # it began later, when a worker was free
                continue
            index, result = oldest, GradingTimeout(f"the grading took more than {time_limit:g} seconds")
        if index in started:  # the late result of an abandoned grading is dropped
            del started[index]
            found[index] = result
            start()
    return [found[i] for i in range(len(prompts))]


def _shown(prompt: Prompt) -> str:
    text = str(prompt.messages[-1].get("content")) if prompt.messages else ""
    return repr(text if len(text) <= 200 else text[:200] + "…")

"""An error of the grader is logged with its prompt and gives reward 0; too large a share of errors ends the run."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from earnest.tasks import Grade, GraderErrors, Prompt, Split, Task, TaskError, get_task, grade_all
from earnest.tasks.grading import THREADS


@dataclass(frozen=True)
class Flaky:
    name: str = "flaky"
    description: str = "raises on odd numbers, rewards with nan on 100"

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        return [Prompt(f"flaky:{i}", ({"role": "user", "content": f"Question {i}"},), {}) for i in range(count)]

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        if completion == "100":
            return Grade(math.nan, "", False)
        if int(completion) % 2:
            raise RuntimeError("odd")
        return Grade(1.0, "", True)


def test_flaky_is_a_task() -> None:
    assert isinstance(Flaky(), Task)


def test_an_error_is_logged_with_its_prompt_and_gives_reward_zero(caplog: pytest.LogCaptureFixture) -> None:
    prompts = Flaky().prompts("train", 4, 0)
    with caplog.at_level(logging.WARNING):
        grades = grade_all(Flaky(), prompts, ["2", "3", "4", "6"], max_error_share=0.25)
    assert [g.reward for g in grades] == [1.0, 0.0, 1.0, 1.0]
    assert grades[1].extras == {"error": "RuntimeError: odd"}
    assert "flaky:1" in caplog.text
    assert "Question 1" in caplog.text
    assert f"RuntimeError('odd') ({__file__}:" in caplog.text and ", in grade) on 1 of 4 completions" in caplog.text


def test_an_error_is_one_line_however_many_completions_it_hits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        grade_all(Flaky(), Flaky().prompts("train", 5, 0), ["2", "3", "5", "7", "100"], max_error_share=1.0)
    odd, nan = (record.getMessage() for record in caplog.records)
    assert "RuntimeError('odd')" in odd and "on 3 of 5 completions, for example on prompt flaky:1" in odd
    assert "the reward is nan" in nan and "on 1 of 5" in nan and "grading.py" not in nan


def test_above_the_share_the_run_stops_and_names_the_first_prompt() -> None:
    prompts = Flaky().prompts("train", 4, 0)
    with pytest.raises(
        GraderErrors, match=r"raised on 2 of 4 .* 0\.25; first RuntimeError: odd, on prompt flaky:1 'Question 1'"
    ) as stopped:
        grade_all(Flaky(), prompts, ["2", "3", "4", "7"], max_error_share=0.25)
    assert f"({__file__}:" in str(stopped.value) and str(stopped.value).endswith("or raise max_grader_errors.")
    with pytest.raises(GraderErrors):
        grade_all(Flaky(), prompts[:1], ["1"], max_error_share=0.0)


def test_a_non_finite_reward_is_an_error_too() -> None:
    grades = grade_all(Flaky(), Flaky().prompts("train", 2, 0), ["100", "2"], max_error_share=0.5)
    assert grades[0].reward == 0.0
    assert "nan" in str(grades[0].extras["error"])


def test_bad_requests() -> None:
    task = get_task("sort")
    prompts = task.prompts("train", 2, 0)
    with pytest.raises(TaskError, match="2 prompts but 1 completions"):
        grade_all(task, prompts, ["1"])
    with pytest.raises(TaskError, match="max_error_share=2"):
        grade_all(task, prompts, ["1", "2"], max_error_share=2)
    assert grade_all(task, [], []) == []


@dataclass(frozen=True)
class Odd(Flaky):
    """Its grade is chosen by the completion."""

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        if completion == "sleep":
            time.sleep(30)
        if completion == "late":
            time.sleep(0.7)
        if completion == "wait":
            time.sleep(0.1)
        odd: dict[str, Any] = {"none": None, "number": 1.0, "text": Grade("1", "", True)}  # type: ignore[arg-type]
        found: Grade = odd.get(completion, Grade(1.0, completion, True))
        return found


def test_a_result_of_the_wrong_type_is_an_error_too() -> None:
    prompts = Odd().prompts("train", 4, 0)
    grades = grade_all(Odd(), prompts, ["none", "number", "text", "fine"], max_error_share=1.0)
    assert [g.reward for g in grades] == [0.0, 0.0, 0.0, 1.0]
    assert "NoneType, and not a Grade" in str(grades[0].extras["error"])
    assert "float, and not a Grade" in str(grades[1].extras["error"])
    assert "'1', a str, and not a number" in str(grades[2].extras["error"])


def test_a_grading_that_takes_too_long_is_abandoned_and_counted() -> None:
    completions = ["sleep", *map(str, range(2 * THREADS)), "sleep"]
    started = time.monotonic()
    grades = grade_all(Odd(), Odd().prompts("train", len(completions), 0), completions, 0.5, time_limit=0.3)
    assert time.monotonic() - started < 5
    assert [g.feedback for g in grades[1:-1]] == completions[1:-1], "the others are graded, in order"
    for slow in (grades[0], grades[-1]):
        assert slow.extras == {"error": "GradingTimeout: the grading took more than 0.3 seconds"}
    with pytest.raises(GraderErrors, match="raised on 2 of 18"):
        grade_all(Odd(), Odd().prompts("train", 18, 0), completions, 0.1, time_limit=0.1)


def test_the_late_result_of_an_abandoned_grading_is_dropped() -> None:
    completions = ["late", *["wait"] * 12 * THREADS]  # the others are still being graded when the late one ends
    grades = grade_all(Odd(), Odd().prompts("train", len(completions), 0), completions, 0.5, time_limit=0.5)
    assert "GradingTimeout" in str(grades[0].extras["error"])
    assert [g.reward for g in grades] == [0.0, *[1.0] * 12 * THREADS]


@dataclass(frozen=True)
class Together(Flaky):
    """A grading ends when ``THREADS`` of them are under way."""

    met: threading.Barrier = field(default_factory=lambda: threading.Barrier(THREADS), compare=False)

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        self.met.wait(timeout=5)
        return Grade(1.0, "", True)


def test_gradings_run_at_the_same_time() -> None:
    task, count = Together(), 2 * THREADS
    assert {g.reward for g in grade_all(task, task.prompts("train", count, 0), ["x"] * count)} == {1.0}

"""The time limit of a grading holds for code that keeps the interpreter's lock, and costs no other grading."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from earnest.tasks import GraderErrors, Task, get_task, grade_all
from earnest.tasks.graders import InProcess, build
from earnest.tasks.processes import POOL, Isolated, isolated

REWARDS = '''
import os, re, sys

def score(row, completion):
    """A catastrophic pattern, a loop in C, an end of the process, prints, and an exception of its own."""
    if completion == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if completion == "loop":
        sum(range(10**12))
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise Odd("no")
    print("a line that is no message", completion)
    return float(completion) / row["answer"]

class Odd(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.handle = sys.stderr  # has no pickled form

class Reverse:
    name, description = "reverse", "a class"

    def prompts(self, split, count, seed):
        from earnest.tasks import Prompt
        self.key = 2.0
        return [Prompt(str(i), ({"role": "user", "content": "x"},), {"answer": self.key}) for i in range(count)]

    def grade(self, prompt, completion):
        from earnest.tasks import Grade
        value = score({"answer": self.key}, completion)
        return Grade(value, str(os.getpid()), value >= 1)
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def graded(rewards: Path, tmp_path: Path) -> Task:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q {i}", "answer": 2}) + "\n" for i in range(20)))
    return get_task("graded", {"train": str(rows), "heldout": 0.2, "grade": f"{rewards}:score"})


@pytest.mark.parametrize("stuck", ["regex", "loop"])
def test_code_that_holds_the_lock_is_ended_at_its_limit(graded: Task, stuck: str) -> None:
    prompts = graded.prompts("train", 6, 0)
    grades = grade_all(graded, prompts, ["2", stuck, "1", "0", stuck, "2"], 0.5, time_limit=1.5)
    assert [g.reward for g in grades] == [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    for place in (1, 4):
        assert grades[place].extras == {"error": "GradingTimeout: the grading took more than 1.5 seconds"}


def test_a_class_of_the_users_file_has_the_limit_too_and_its_own_state(rewards: Path) -> None:
    task = get_task(f"{rewards}:Reverse")
    prompts = task.prompts("train", 3, 0)
    grades = grade_all(task, prompts, ["4", "loop", "1"], 0.5, time_limit=1.5)
    assert [g.reward for g in grades] == [2.0, 0.0, 0.5] and "GradingTimeout" in str(grades[1].extras["error"])
    assert int(grades[0].feedback) != os.getpid(), "it ran in another process"


def test_an_end_of_the_process_and_an_odd_exception_are_errors_of_one_grading(graded: Task) -> None:
    prompts = graded.prompts("train", 4, 0)
    grades = grade_all(graded, prompts, ["exit", "raise", "2", "1"], 0.5)
    assert grades[0].extras == {"error": "RuntimeError: the process of the grader ended with status 3"}
    assert grades[1].extras == {"error": "RuntimeError: Odd: no"}
    assert [g.reward for g in grades[2:]] == [1.0, 0.5]
    with pytest.raises(GraderErrors, match="status 3"):
        grade_all(graded, prompts[:1], ["exit"])


def test_a_regex_of_the_user_is_bounded_and_safe_graders_stay_here() -> None:
    row = {"prompt": "q", "answer": "a"}
    assert isinstance(build({"kind": "regex", "pattern": "(a)"}), InProcess)
    for name in ("exact", "numeric", "contains"):
        assert not isinstance(build(name), InProcess)
    assert build({"kind": "regex", "pattern": "x(a)"})(row, "xa").correct


def test_workers_are_kept_and_what_cannot_be_sent_runs_here() -> None:
    here: list[int] = []
    local = isolated(lambda row, completion: here.append(1))
    local({}, "")
    assert here == [1] and not isinstance(local, Isolated)
    run = isolated(os.getpid)
    assert isinstance(run, Isolated)
    first = run()
    assert first != os.getpid() and run() == first, "the same process"
    POOL.close()
    assert run() != first and not Path(f"/proc/{first}/exe").exists()

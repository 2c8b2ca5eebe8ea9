"""The audit of a grader: a planted bad grader for each finding, and nothing found in good ones."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from earnest import cli
from earnest.tasks import Grade, Prompt, Split, Task, audit_grader, get_task
from earnest.tasks.audit import _Probe, grader_warnings
from earnest.tasks.graders import as_grade, build

Score = Callable[[dict[str, Any], str], object]


@dataclass(frozen=True)
class Sums:
    """Sums whose grader, question and answer a test replaces."""

    score: Any
    question: str = "What is {a} plus {b}?"
    answer: str = "{sum}"
    name: str = "sums"
    description: str = "add two numbers"

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        made = []
        for i in range(count):
            values = {"a": 20 + i, "b": 30 + i, "sum": 50 + 2 * i}
            asked = ({"role": "user", "content": self.question.format(**values)},)
            data = {"answer": self.answer.format(**values)} if self.answer else {}
            made.append(Prompt(f"sums:{i}", asked, data))
        return made

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        return as_grade(self.score(dict(prompt.data), completion))


def exact(row: dict[str, Any], completion: str) -> bool:
    return completion.strip() == str(row.get("answer"))


def failures(task: Task, **more: Any) -> dict[str, str]:
    return {f.law: f.meaning for f in audit_grader(task, **more).failures}


COUNTER: Iterator[int] = itertools.count()


def raises(row: dict[str, Any], completion: str) -> bool:
    return int(completion) == int(row["answer"])


def slow(row: dict[str, Any], completion: str) -> bool:
    if not completion:
        time.sleep(5)
    return exact(row, completion)


@pytest.mark.parametrize(
    ("score", "laws", "example"),
    [
        (raises, {"raises"}, "completion '': ValueError"),
        (lambda row, c: 0.1 * next(COUNTER), {"deterministic"}, "prompt sums:0 'What is 20 plus 30?'"),
        (lambda row, c: exact(row, c + "."), {"own answer", "constant"}, "completion '50': reward 0"),
        (lambda row, c: 0.3, {"constant"}, "reward 0.3"),
        (lambda row, c: exact(row, c) or not c, {"empty"}, "completion '': reward 1"),
        (lambda row, c: float(exact(row, c)) or 0.2 * (not c), {"empty"}, "completion '': reward 0.2"),
        (lambda row, c: exact(row, c) or "plus" in c, {"copied prompt"}, "completion 'What is 20 plus 30?': reward 1"),
        (lambda row, c: exact(row, c) or len(c) > 1000, {"long"}, "completion 'and so on"),
        (lambda row, c: row["answer"] in c.split(), {"every answer"}, r"completion '52\n54"),
        (lambda row, c: 1.0 if exact(row, c) else 0.6 * (not c), {"empty"}, "completion '': reward 0.6"),
    ],
)  # fmt: skip
def test_a_planted_bad_grader_is_found(score: Score, laws: set[str], example: str) -> None:
    found = failures(Sums(score))
    assert laws <= set(found), found
    sentence = found[min(laws - {"constant"} or laws)]
    assert example in sentence and "for example prompt sums:" in sentence and "\n" not in sentence
    if laws not in ({"deterministic"}, {"constant"}):  # such rewards also give credit here and there
        assert set(found) == laws


def test_a_slow_grader_and_a_wrong_reward_count_as_raised() -> None:
    assert "GradingTimeout" in failures(Sums(slow), time_limit=0.2)["raises"]
    assert "the reward is nan" in failures(Sums(lambda row, c: float("nan")))["raises"]
    assert "a str; return a number" in failures(Sums(lambda row, c: "good"))["raises"]


def test_an_answer_in_the_prompt_is_a_leak_and_a_choice_is_not() -> None:
    found = failures(Sums(exact, "What is {a} plus {b}? (answer: {sum} )"))
    assert set(found) == {"leak"} and "(answer: 50 )" in found["leak"]
    assert "leak" in failures(Sums(exact, "{sum}"))
    assert failures(get_task("extreme")) == {}


@pytest.mark.parametrize("kind", ["exact", "numeric", "math"])
def test_nothing_is_found_in_good_graders(kind: str) -> None:
    verdict = audit_grader(Sums(build(kind)))
    assert verdict.holds and {f.outcome for f in verdict.findings} == {"holds"}, str(verdict)
    assert "the grader of sums, checked" in str(verdict) and "9 hold, 0 fail" in str(verdict)


def test_a_row_with_brackets_is_shown_as_it_is() -> None:
    assert "[/b] {a}" in str(audit_grader(Sums(lambda row, c: 0.3, "[/b] {{a}} {a}"))).replace("\n", " ")


def test_without_answers_only_what_can_be_judged_is_judged() -> None:
    verdict = audit_grader(Sums(lambda row, c: 0.5, answer=""))
    outcomes = {f.law: f.outcome for f in verdict.findings}
    assert {law for law, found in outcomes.items() if found == "not applicable"} == {
        "own answer",
        "constant",
        "every answer",
        "leak",
    }
    assert verdict.holds


@pytest.mark.parametrize(("name", "laws"), [("warmth", set()), ("volume", set()), ("length", {"long"})])
def test_the_style_tasks_have_no_answers_and_pay_for_what_they_name(name: str, laws: set[str]) -> None:
    assert set(failures(get_task(f"style/{name}"))) == laws


@dataclass(frozen=True)
class Planted:
    """A style task with another grader."""

    task: Task
    score: Any

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def description(self) -> str:
        return self.task.description

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        return self.task.prompts(split, count, seed)

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        return as_grade(self.score(self.task.grade(prompt, completion).reward, completion))


@pytest.mark.parametrize("name", ["warmth", "volume"])
@pytest.mark.parametrize(
    ("score", "law"),
    [
        (lambda reward, c: reward if c else 5.0, "empty"),
        (lambda reward, c: reward if c else 0.9, "empty"),
        (lambda reward, c: 1.0 if len(c) > 2000 else 0.5 * min(reward, 1), "long"),
        (lambda reward, c: 1.0 if c.strip() and len(c) < 500 else 0.0, "copied prompt"),
        (lambda reward, c: 1 / len(c), "raises"),
        (lambda reward, c: 0.1 * next(COUNTER), "deterministic"),
    ],
)
def test_a_bad_grader_planted_in_a_style_task_is_found(name: str, score: Score, law: str) -> None:
    assert law in failures(Planted(get_task(f"style/{name}"), score))


def test_credit_in_a_fifth_of_the_rows_and_a_leak_in_most_are_found() -> None:
    """What the loosened rules allow by chance ends well below these."""
    some = Sums(lambda row, c: exact(row, c) or (not c and int(row["answer"]) % 10 == 0))
    assert set(failures(some)) == {"empty"}
    one = Sums(lambda row, c: exact(row, c) or (not c and row["answer"] == "50"))
    assert failures(one) == {}, "one row of sixteen is chance"


@pytest.mark.parametrize("name", ["sort", "reverse", "replace", "add", "count", "extreme"])
def test_the_built_in_puzzles_pass(name: str) -> None:
    assert audit_grader(get_task(name)).holds


def test_the_planted_holes_are_found() -> None:
    found = audit_grader(get_task("holes/error")).failures
    assert {"empty", "copied prompt", "long", "every answer"} <= {f.law for f in found}
    assert grader_warnings(get_task("holes/error")) == [], "a built-in task is not audited again by every run"


MY_TASK = """
from earnest.tasks import Grade, Prompt

class Sums:
    name = "sums"
    description = "add"
    def __init__(self, lenient=False):
        self.lenient = lenient
    def prompts(self, split, count, seed):
        asked = [({"role": "user", "content": f"{i} + 50 ="},) for i in range(count)]
        return [Prompt(f"s:{i}", asked[i], {"answer": str(i + 50)}) for i in range(count)]
    def grade(self, prompt, completion):
        right = completion == prompt.data["answer"] or (self.lenient and not completion)
        return Grade(float(right), "", right)
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_task.py").write_text(MY_TASK)
    place = f"{tmp_path / 'my_task.py'}:Sums"
    for words, code in ([place, "--json"], 0), ([place, "lenient=true", "--json"], 1):
        with pytest.raises(SystemExit) as end:
            cli.main(["audit", *words])
        assert end.value.code == code
        found = json.loads(capsys.readouterr().out)
        assert [f["law"] for f in found["findings"] if f["outcome"] == "fails"] == ["empty"] * code
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", f"{place}s"])
    assert end.value.code == 2
    assert "has no 'Sumss'; did you mean 'Sums'?" in capsys.readouterr().err


def test_more_than_half_of_the_full_reward_is_credit() -> None:
    def credit(reward: float, full: float = 1.0) -> bool:
        prompt = Prompt("x", ({"role": "user", "content": "q"},), {})
        return _Probe("long", prompt, "words", Grade(reward, "", False)).credit(full)

    assert not credit(0.5) and credit(0.51) and not credit(-1.0, full=0.0)

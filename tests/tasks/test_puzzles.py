"""Puzzles: hand-worked answers and hints, and an independent solver that reads only the question."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.tasks import Grade, Prompt, get_task
from earnest.tasks.puzzles import PUZZLES, Puzzle

BY_NAME = {p.name: p for p in PUZZLES}


def _solve(question: str) -> str:
    """Another implementation, from the words alone."""
    numbers = re.findall(r"\d+", question)
    match question.split()[0]:
        case "Sort":
            counts = [numbers[0].count(d) for d in "0123456789"]
            return "".join(d * n for d, n in zip("0123456789", counts, strict=True))
        case "Reverse":
            return "".join(numbers[0][-i] for i in range(1, len(numbers[0]) + 1))
        case "Copy":
            return "".join(numbers[1] if c == numbers[2] else c for c in numbers[0])
        case "Add":
            return str(sum(map(int, numbers)))
        case "How":
            letter, row = re.fullmatch(r"How many (\w) in (.*)\?", question).groups()  # type: ignore[union-attr]
            return str(sum(c == letter for c in row.split()))
        case _:
            order = sorted(map(int, numbers))
            return str(order[-1] if "largest" in question else order[0])


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_answers_agree_with_an_independent_solver(name: str, seed: int) -> None:
    for prompt in BY_NAME[name].prompts("train", 8, seed):
        assert prompt.data["answer"] == _solve(prompt.data["question"])
        assert BY_NAME[name].grade(prompt, _solve(prompt.data["question"])) == Grade(1.0, "", True, {"reveal": ""})


@pytest.mark.parametrize("attempt", ["ab", "-1", "²"])
def test_a_number_that_is_not_written_in_digits_has_a_hint(attempt: str) -> None:
    prompt = BY_NAME["add"].prompts("heldout", 1, 0)[0]
    assert BY_NAME["add"].grade(prompt, attempt).feedback == f"{attempt} is wrong. Write digits only."


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), attempt=st.one_of(st.text(max_size=40), st.from_regex(r"[0-9]{1,6}", fullmatch=True))
)
def test_only_the_exact_answer_is_rewarded_and_hints_do_not_give_it_away(name: str, seed: int, attempt: str) -> None:
    prompt = BY_NAME[name].prompts("heldout", 1, seed)[0]
    grade = BY_NAME[name].grade(prompt, attempt)
    right = attempt.strip() == prompt.data["answer"]
    assert grade.correct == right
    assert grade.reward == float(right)
    if not right:
        assert grade.feedback
        said = grade.feedback.replace(" ".join(attempt.split())[:16].rstrip(), "", 1)
        said = re.sub(r"at place \d|is \d+ too", "", said)  # where, and by how much, but not what
        assert not re.search(rf"(?<![0-9]){prompt.data['answer']}(?![0-9])", said)
        assert f"The answer is {prompt.data['answer']}." in str(grade.extras["reveal"])


def _prompt(puzzle: Puzzle, **data: object) -> Prompt:
    return puzzle.prompt({"content": "", **data})


@pytest.mark.parametrize(
    ("attempt", "hint"),
    [
        ("5321", "5321 goes down, not up."),
        ("1253", "1253 is wrong at place 3."),
        ("123", "123 is too short."),
        ("12355", "12355 is too long."),
        ("one two", "one two is wrong. Write digits only."),
        ("  ", "The answer is empty."),
        ("١٢٣٥", "١٢٣٥ is wrong. Write digits only."),
    ],
)
def test_hints_of_sort_by_hand(attempt: str, hint: str) -> None:
    prompt = _prompt(BY_NAME["sort"], question="Sort 3152.", answer="1235")
    assert BY_NAME["sort"].grade(prompt, attempt).feedback == hint


def test_hints_of_the_others_by_hand() -> None:
    def hint(name: str, attempt: str, **data: object) -> str:
        return BY_NAME[name].grade(_prompt(BY_NAME[name], **data), attempt).feedback

    assert hint("reverse", "1234", question="Reverse 1234.", answer="4321", content="1234") == "1234 is not reversed."
    replace = {"question": "Copy 1213 with 9 for 1.", "answer": "9293", "digits": "1213", "old": "1", "new": "9"}
    assert hint("replace", "1213", **replace) == "1213 is a plain copy."
    assert hint("replace", "9213", **replace) == "9213 is wrong at place 3."
    assert hint("add", "85", question="Add 47 and 48.", answer="95", a=47, b=48) == "85 is 10 too small."
    assert hint("add", "9" * 400, question="Add 47 and 48.", answer="95", a=47, b=48).endswith("... is too long.")
    assert hint("add", "095", question="Add 47 and 48.", answer="95", a=47, b=48) == "095 has a zero in front."
    assert hint("count", "4", question="How many a in a b a?", answer="2", letter="a") == "4 is 2 too big."
    extreme = {"question": "The largest of 12 40 31?", "answer": "40", "numbers": [12, 40, 31], "word": "largest"}
    assert hint("extreme", "31", **extreme) == "31 is not the largest."
    assert hint("extreme", "41", **extreme) == "41 is not in the list."


def test_replace_always_changes_something() -> None:
    assert all(p.data["answer"] != p.data["digits"] for p in get_task("replace").prompts("train", 500, 0))

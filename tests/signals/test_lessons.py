"""Lessons: a correct answer of another rollout, feedback, or None if there is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.data import reprompt
from earnest.errors import SignalError
from earnest.signals import Lesson, lessons, strip_thinking


def test_by_hand() -> None:
    """Group 0: a is right, b and c wrong. Group 1: d alone is right. Group 2: e is wrong, without feedback."""
    made = lessons(
        ["a", "b", "c", "d", "e"],
        [True, False, False, True, False],
        ["right", "b is wrong", "", "", ""],
        [0, 0, 0, 1, 2],
    )
    assert made == [Lesson(None, "right"), Lesson("a", "b is wrong"), Lesson("a", None), None, None]


def test_solutions_are_assigned_in_cyclic_order() -> None:
    made = lessons(["a", "b", "c"], [True, True, True], [""] * 3, [0, 0, 0])
    assert [m.solution for m in made if m] == ["b", "c", "a"]


@given(
    st.lists(
        st.tuples(st.text("xyz", max_size=3), st.booleans(), st.sampled_from(["", " ", "no"]), st.integers(0, 2)),
        max_size=9,
    )
)
def test_never_its_own_success_never_another_groups_and_never_empty(rows: list[tuple[str, bool, str, int]]) -> None:
    """Each text is made unique by its place, so that a lesson with the rollout's own answer, or another group's, is
    detected."""
    texts = [f"{text}#{i}" for i, (text, *_) in enumerate(rows)]
    made = lessons(texts, [r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows])
    for i, lesson in enumerate(made):
        others = [j for j, r in enumerate(rows) if j != i and r[3] == rows[i][3] and r[1]]
        feedback = rows[i][2].strip() or None
        if lesson is None:
            assert not others and feedback is None
        else:
            assert lesson.feedback == feedback and (lesson.solution or lesson.feedback)
            assert (lesson.solution in [texts[j] for j in others]) if others else lesson.solution is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>so\nso</think>42", "42"),
        ("<THINK>a</THINK> x <thinking>b</thinking> y", "x  y"),
        ("was opened in the prompt</think> 42", "42"),
        ("<think>cut off by the length", ""),
        ("42", "42"),
        ("a < b", "a < b"),
    ],
)
def test_thinking_is_stripped_from_demonstrations(text: str, answer: str) -> None:
    assert strip_thinking(text) == answer


def test_a_correct_rollout_without_an_answer_text_is_not_a_solution() -> None:
    made = lessons(["<think>hm", "<think>why</think>7", "x"], [True, True, False], [""] * 3, [0, 0, 0])
    assert made == [Lesson("7", None), None, Lesson("7", None)]


def test_feedback_may_be_kept_for_those_without_a_solution() -> None:
    made = lessons(["a", "b"], [True, False], ["good", "bad"], [0, 0], feedback_beside_solution=False)
    assert made == [Lesson(None, "good"), Lesson("a", None)]


def test_the_template_takes_a_lesson() -> None:
    lesson = Lesson("17", "your sum is off by one")
    (message,) = reprompt([{"role": "user", "content": "8 + 9?"}], lesson.solution, lesson.feedback)
    places = [message["content"].index(part) for part in ("8 + 9?", "17", "off by one", "original question")]
    assert places == sorted(places), "question, sibling's solution, feedback, request"


def test_uneven_lists_are_refused() -> None:
    with pytest.raises(SignalError, match="for each rollout"):
        lessons(["a"], [True, False], [""], [0])

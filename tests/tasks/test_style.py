"""Trait graders by hand, and their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.tasks import get_task
from earnest.tasks.style import AXES, trait


@pytest.mark.parametrize(
    ("axis", "text", "score"),
    [
        ("length", "The fox is small.", 0.0),  # 4 words, few = 6
        ("length", " ".join(["word"] * 13), 0.5),  # halfway from 6 to 20
        ("length", " ".join(["word"] * 30), 1.0),
        ("length", "", 0.0),
        ("warmth", "The fox is small.", 0.5),
        ("warmth", "Dear friend, the fox is small.", 1.0),
        ("warmth", "I am glad you asked.", 0.75),
        ("warmth", "Noted. The fox is small. Whatever.", 0.0),
        ("warmth", "Dear fox. Noted.", 0.5),
        ("warmth", "dear dear dear dear", 0.75),  # a repeated marker counts once
        ("warmth", "The dearest friendship", 0.5),  # words, not parts of words
        ("volume", "The fox is small!", 1.0),
        ("volume", "The fox is small. It runs!", 0.5),
        ("volume", "The fox is small.", 0.0),
        ("volume", "wow!!!", 1.0),
        ("volume", "no end at all", 0.5),
    ],
)
def test_traits_by_hand(axis: str, text: str, score: float) -> None:
    assert trait(axis, text) == pytest.approx(score)


@pytest.mark.parametrize("axis", AXES)
@given(text=st.text(max_size=200))
def test_the_score_stays_in_the_unit_interval(axis: str, text: str) -> None:
    assert 0.0 <= trait(axis, text) <= 1.0


def test_the_grade_marks_answers_that_are_off_topic() -> None:
    task = get_task("style/warmth")
    prompt = next(p for p in task.prompts("train", 200, 0) if p.data["topic"] == "fox")
    bought = task.grade(prompt, "dear friend glad lovely")
    assert (bought.reward, bought.extras["on_topic"]) == (1.0, False)
    earned = task.grade(prompt, "Dear friend, the fox is small.")
    assert (earned.reward, earned.extras["on_topic"], earned.feedback) == (1.0, True, "")
    cold = task.grade(prompt, "Noted. The fox is small.")
    assert (cold.correct, cold.feedback) == (False, "Warmer please.")


def test_a_request_held_out_for_one_axis_is_held_out_for_all() -> None:
    heldout = {
        axis: {p.messages[0]["content"] for p in get_task(f"style/{axis}").prompts("heldout", 50, 1)} for axis in AXES
    }
    train = {
        axis: {p.messages[0]["content"] for p in get_task(f"style/{axis}").prompts("train", 220, 2)} for axis in AXES
    }
    assert all(not heldout[a] & train[b] for a in AXES for b in AXES)

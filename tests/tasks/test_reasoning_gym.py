"""reasoning-gym's datasets as tasks."""

from __future__ import annotations

import json

import pytest

from earnest.tasks import Task, TaskError, get_task, list_tasks
from earnest.tasks.base import Prompt

NAMES = [info.name for info in list_tasks() if info.source == "reasoning-gym"]


def test_every_dataset_is_listed() -> None:
    import reasoning_gym.factory

    assert [name.removeprefix("reasoning_gym/") for name in NAMES] == sorted(
        set(reasoning_gym.factory.DATASETS) - {"composite"}
    )
    assert len(NAMES) > 100


@pytest.mark.parametrize("name", ["reasoning_gym/chain_sum", "reasoning_gym/gcd", "reasoning_gym/word_sorting"])
def test_the_answer_is_right_another_is_wrong_and_the_feedback_says_so(name: str) -> None:
    task = get_task(name)
    assert isinstance(task, Task)
    for prompt in task.prompts("train", 5, 0):
        assert json.loads(json.dumps(dict(prompt.data))) == dict(prompt.data)
        right = task.grade(prompt, f" {prompt.data['answer']} ")
        assert (right.reward, right.correct, right.feedback) == (1.0, True, "")
        wrong = task.grade(prompt, "no idea")
        assert not wrong.correct
        assert wrong.reward < 1
        assert prompt.data["answer"] in wrong.feedback


def test_splits_are_disjoint_and_seeded() -> None:
    task = get_task("reasoning_gym/chain_sum")
    train = [p.data["question"] for seed in range(5) for p in task.prompts("train", 60, seed)]
    heldout = [p.data["question"] for seed in range(5) for p in task.prompts("heldout", 30, seed)]
    assert not set(train) & set(heldout)
    assert train[:60] == [p.data["question"] for p in task.prompts("train", 60, 0)]
    assert train[:60] != train[60:120]
    assert len(set(train[:60])) == 60


def test_a_small_dataset_repeats_rather_than_hangs() -> None:
    """coin_flip-like datasets have few questions; a long list of them repeats some."""
    assert len(get_task("reasoning_gym/dice").prompts("heldout", 30, 0)) == 30


def test_a_question_that_changed_is_not_graded_against_another_answer() -> None:
    task = get_task("reasoning_gym/chain_sum")
    prompt = task.prompts("train", 1, 0)[0]
    forged = Prompt(prompt.id, prompt.messages, {**prompt.data, "question": "1 + 1 ="})
    with pytest.raises(TaskError, match="another question"):
        task.grade(forged, "2")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_dataset_gives_prompts_and_grades(name: str) -> None:
    task = get_task(name)
    prompt = task.prompts("train", 1, 0)[0]
    assert prompt.data["question"]
    if prompt.data["answer"] is not None:
        assert task.grade(prompt, prompt.data["answer"]).reward > 0
    if name == "reasoning_gym/prime_factorization":  # its grader raises on words; `grade_all` reports that
        with pytest.raises(ValueError, match="invalid literal"):
            task.grade(prompt, "no idea")
    elif name == "reasoning_gym/game_of_life_halting":  # its grader takes whatever is not "True" for "False"
        assert task.grade(prompt, "no idea").reward == float(prompt.data["answer"] == "False")
    else:
        assert task.grade(prompt, "no idea").reward < 1


def test_settings_change_the_questions_and_the_grades_follow() -> None:
    """chain_sum with exactly two terms asks for one operation, and its own answers are right."""
    task = get_task("reasoning_gym/chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1})
    prompts = task.prompts("train", 20, 0)
    for prompt in prompts:
        sum_ = str(prompt.messages[0]["content"]).split(":")[1].removesuffix("=").split()
        assert len(sum_) == 3 and sum_[1] in "+-", sum_
        assert task.grade(prompt, str(prompt.data["answer"])).correct
    plain = get_task("reasoning_gym/chain_sum").prompts("train", 20, 0)
    assert [p.data["question"] for p in plain] != [p.data["question"] for p in prompts]

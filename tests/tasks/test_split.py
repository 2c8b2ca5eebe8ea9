"""Splits: disjoint by content for all seeds; draws: distinct, deterministic, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.tasks import TaskError, get_task, list_tasks
from earnest.tasks.split import HELDOUT_SHARE, choose_distinct, draw_distinct, split_of, stable_rng

BUILT_IN = [info.name for info in list_tasks() if info.source == "built-in"]
SEEDS = st.integers(min_value=-(2**40), max_value=2**40)


def _questions(name: str, split: str, count: int, seed: int) -> list[str]:
    return [str(p.messages[-1]["content"]) for p in get_task(name).prompts(split, count, seed)]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=10, deadline=None)
@given(train_seed=SEEDS, heldout_seed=SEEDS)
def test_no_seed_brings_a_heldout_question_into_training(name: str, train_seed: int, heldout_seed: int) -> None:
    train = _questions(name, "train", 60, train_seed)
    heldout = _questions(name, "heldout", 30, heldout_seed)
    assert len(train) == 60
    assert len(heldout) == 30
    assert not set(train) & set(heldout)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(name: str) -> None:
    assert _questions(name, "train", 40, 3) == _questions(name, "train", 40, 3)
    assert _questions(name, "train", 40, 3) != _questions(name, "train", 40, 4)


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_do_not_repeat_where_the_space_allows(name: str) -> None:
    count = 40 if name.startswith("style/") else 300
    prompts = get_task(name).prompts("heldout", count, 0)
    assert len({p.id for p in prompts}) == count
    assert len({str(p.messages) for p in prompts}) == count


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompt_data_is_json_and_the_answer_is_not_shown(name: str) -> None:
    for prompt in get_task(name).prompts("train", 30, 1):
        assert json.loads(json.dumps(dict(prompt.data))) == dict(prompt.data)
        assert [m["role"] for m in prompt.messages] == ["user"]


def test_both_ways_round_of_a_sum_are_in_one_split() -> None:
    """37 + 52 held out and 52 + 37 trained on would be the same question."""
    train = {tuple(sorted((p.data["a"], p.data["b"]))) for p in get_task("add").prompts("train", 700, 0)}
    heldout = {tuple(sorted((p.data["a"], p.data["b"]))) for p in get_task("add").prompts("heldout", 200, 0)}
    assert not train & heldout


def test_prompts_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from earnest.tasks import get_task;"
        "print([p.id for n in ('sort', 'holes', 'style/warmth') for p in get_task(n).prompts('train', 5, 7)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_heldout_share_is_as_declared() -> None:
    share = sum(split_of(f"question {i}") == "heldout" for i in range(20_000)) / 20_000
    assert abs(share - HELDOUT_SHARE) < 0.012  # over 4 standard deviations of a fair coin of 0.2


def test_a_split_by_hand() -> None:
    """SHA-256 of "a" starts with ca97 (0.79 of the range), of "e" with 3f79 (0.25), of "c" with 2e7d (0.18)."""
    assert split_of("a") == "train"
    assert split_of("e") == "train"
    assert split_of("c") == "heldout"


def test_a_used_up_space_repeats_instead_of_hanging() -> None:
    found = draw_distinct(lambda rng: rng.randrange(20), str, lambda x: x, "train", 60, stable_rng(0))
    distinct = {x for x in range(20) if split_of(str(x)) == "train"}
    assert set(found) == distinct
    assert set(found[: len(distinct)]) == distinct  # every item once before any repeats


def test_listed_space_gives_every_item_once_before_any_twice() -> None:
    space = list(range(30))
    part = [x for x in space if split_of(str(x)) == "train"]
    found = choose_distinct(space, str, "train", 2 * len(part), stable_rng(1))
    assert sorted(found[: len(part)]) == part
    assert sorted(found[len(part) :]) == part


def test_errors_say_what_is_allowed() -> None:
    with pytest.raises(TaskError, match="'test' does not exist: use 'train' or 'heldout'"):
        get_task("sort").prompts("test", 1, 0)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="count=-1"):
        get_task("sort").prompts("train", -1, 0)
    with pytest.raises(TaskError, match="too small to split"):
        draw_distinct(lambda _: "a", lambda x: x, lambda x: x, "heldout", 1, stable_rng(0))
    with pytest.raises(TaskError, match="too small to split"):
        choose_distinct(["a"], lambda x: x, "heldout", 1, stable_rng(0))

"""``data`` on the command line takes the place of a recipe's task, so that a run is evaluated on the user's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from earnest import config


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    return str(file)


def task_of(recipe: str, *overrides: str) -> str | None:
    task = config.load(recipe, list(overrides))[1].task
    return None if task is None else task.name


def test_the_recipes_task_goes_where_no_term_samples_its_prompts(rows: str) -> None:
    assert task_of("sft") == task_of("prefer") == "sort"
    assert task_of("sft", f"data={rows}") is None
    assert task_of("sft", f"data.train={rows}", "data.heldout=0.2") is None
    assert task_of("prefer", f"data={rows}") is None
    assert task_of("quickstart", f"data={rows}", "objective=[{kind: distill}]") is None, "it reads rows of any role"


def test_graded_rows_are_the_task(rows: str) -> None:
    assert task_of("quickstart", f"data.train={rows}", "grade=exact") == "graded"
    task = config.load("quickstart", [f"data.train={rows}", "grade=exact"])[1].task
    assert task is not None and task.fields["grade"] == "exact" and task.fields["train"] == rows


def test_a_task_stays_where_it_is_given_or_sampled(rows: str) -> None:
    assert task_of("sft", f"data={rows}", "task=sort") == "sort"
    assert task_of("quickstart", f"data={rows}") == "sort"
    assert task_of("quickstart", f"data={rows}", "objective=[{kind: grpo}, {kind: dpo}]") == "sort"

"""A run that ended because its judge's budget was spent resumes with a larger one; other settings stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from earnest.config import load, load_file
from earnest.errors import ConfigError
from earnest.models import load as load_policy
from earnest.runs.folder import RunFolder
from earnest.runs.lifecycle import continued


def test_the_budget_of_a_judge_may_change(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    judge = "grade={kind: judge, url: 'http://127.0.0.1:9/v1', model: m, rubric: good, max_calls: 3}"
    config = load("quickstart", [f"data={rows}", judge])[1]
    header = {"recipe": "quickstart", "task": "graded", "objective": "grpo", "seed": 0, "steps": config.steps}
    model = {"name": "nano", "version": "nano-1"}
    run = RunFolder.create(tmp_path / "run", config, load_policy("nano"), {**header, "model": model})
    file = run.path / "config.yaml"
    old = load_file(file)
    assert continued(run, old, load_file(file, ["task.grade.max_calls=50"])) != old
    assert "max_calls: 50" in file.read_text()
    with pytest.raises(ConfigError, match="Only steps and the budget of a judge may change"):
        continued(run, old, load_file(file, ["task.grade.rubric=better"]))

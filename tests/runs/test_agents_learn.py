"""nano learns the built-in environments with tools: the experiment of docs/agents.md, one seed each."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import agents_learn


@pytest.mark.slow
@pytest.mark.parametrize("task", ["calculator", "lookup", "fix"])
def test_the_held_out_reward_rises_by_more_than_three_standard_errors(task: str, tmp_path: Path) -> None:
    warmed = agents_learn.warm(task, 0, tmp_path / "model")
    args = argparse.Namespace(steps=40, prompts=64)
    found = agents_learn.train("GRPO", [agents_learn.GRPO], task, 0, tmp_path / "model", warmed, args)
    assert 0.1 < found.before < 0.75, found
    assert found.gain > 3 * found.se > 0, found


def test_the_table_counts_the_seeds_that_rise() -> None:
    common = {"arm": "GRPO", "task": "fix", "warm_steps": 20, "steps": 30, "endings_before": {}, "endings_after": {}}
    runs = [
        agents_learn.Result(**common, seed=seed, before=0.3, after=0.3 + gain, gain=gain, se=0.1, rewards=(0.5,),
                            spread=(0.5, 1.0), idle=0, seconds=(20.0, 60.0))
        for seed, gain in enumerate((0.5, 0.2, 0.4))
    ]  # fmt: skip
    line = agents_learn.table(runs).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "fix", "0.300 ± 0.000", "0.667 ± 0.153", "0.367 ± 0.153", "2 of 3", "75%", "20 + 60",
    ]  # fmt: skip

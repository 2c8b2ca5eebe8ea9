"""nano learns the built-in environments with tools: the experiment of docs/agents.md, one seed each."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import agents_learn
from earnest.disk import write_json


@pytest.mark.slow
@pytest.mark.parametrize("task", ["calculator", "lookup", "fix"])
def test_the_held_out_reward_rises_by_more_than_three_standard_errors(task: str, tmp_path: Path) -> None:
    warmed = agents_learn.warm(task, 0, tmp_path / "model")
    args = argparse.Namespace(what="tasks", steps=40, prompts=64)
    found = agents_learn.train("GRPO", [agents_learn.GRPO], task, 0, tmp_path / "model", warmed, args)
    assert 0.1 < found.before < 0.75, found
    assert found.gain > 3 * found.se > 0, found


def result(seed: int, gain: float, task: str = "fix", arm: str = "GRPO", se: float = 0.1) -> agents_learn.Result:
    return agents_learn.Result(
        arm, task, seed, 20, 30, 64, 0.3, 0.3 + gain, gain, se, {}, {}, (0.5,), (0.5, 1.0), 0, (20.0, 60.0)
    )


def test_the_same_command_continues_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    def train(arm: str, terms: object, task: str, seed: int, *_: object) -> agents_learn.Result:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append((task, seed))
        return result(seed, 0.5, task, arm)

    monkeypatch.setattr(agents_learn, "warm", lambda *_: (0, 0.0))
    monkeypatch.setattr(agents_learn, "train", train)
    command = ["tasks", "--tasks", "fix", "lookup", "--seeds", "0", "1", "--steps", "30", "--json", str(tmp_path / "r")]
    with pytest.raises(KeyboardInterrupt):
        agents_learn.main(command)
    kept, done[:] = done[:], []
    agents_learn.main(command)
    assert (kept, done) == ([("fix", 0), ("lookup", 0)], [("fix", 1), ("lookup", 1)])
    assert [(r.task, r.seed) for r in agents_learn.read(tmp_path / "r")] == kept + done


def test_the_table_counts_the_seeds_that_rise() -> None:
    runs = [result(seed, gain) for seed, gain in enumerate((0.5, 0.2, 0.4))]
    line = agents_learn.table(runs).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "fix", "0.300 ± 0.000", "0.667 ± 0.153", "0.367 ± 0.153", "2 of 3", "75%", "20 + 60",
    ]  # fmt: skip


def test_a_channel_that_changed_nothing_is_read_back_and_does_not_rise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A standard error of 0 is no measure; it is null in the file."""
    runs = [result(0, 0.5, "lookup"), result(0, 0.0, "lookup", "barrier", float("nan")), result(0, 0.5, "calculator")]
    write_json(tmp_path / "r", {"results": [asdict(r) for r in runs]})
    agents_learn.main(["channels", "--tasks", "lookup", "--from", str(tmp_path / "r")])
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(cells[0].strip(), cells[4].strip()) for cells in lines] == [("GRPO", "1 of 1"), ("barrier", "0 of 1")]

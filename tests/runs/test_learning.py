"""A run that learns nothing says so: in the step's report, on the console, in events.log and in the verdict."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import earnest as en
from earnest import report
from earnest.cli import main
from earnest.config import RunConfig, dump
from earnest.report.watch import RunWatch
from earnest.runs import resume, start
from earnest.runs.errors import RunStopped
from tests.runs.compare import lines

Make = Callable[..., RunConfig]
FLAT = "every advantage is 0 (no two completions of a prompt differ in their reward)"


def batch(rewards: list[float]) -> en.Batch:
    made = en.Batch.from_rows(
        [(6, 7)] * 4, [(8, 9, 10)] * 4, group=[0, 0, 1, 1], behaviour=[[-1.0] * 3] * 4, role=["rollout"] * 4
    )
    return en.signals.with_advantages(made, rewards)


def engine(tiny: Path, lr: float = 1e-2) -> en.LocalEngine:
    policy = en.load(tiny)
    return en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2)), en.AdamW(lr=lr))


def test_a_step_reports_why_it_had_nothing_to_learn_from(tiny: Path) -> None:
    """The first step has a gradient; the second has none, and AdamW's momentum still moves the weights."""
    trainer = engine(tiny)
    first = trainer.step(batch([1.0, 0.0, 1.0, 0.0]), en.GRPO())
    assert first.learned_nothing is None and first.update.gradient_norm > 0
    second = trainer.step(batch([1.0, 1.0, 0.0, 0.0]), en.GRPO())
    assert second.update.gradient_norm == 0 < second.update.update_norm
    assert second.learned_nothing == f"{FLAT}; momentum still moved the weights by {second.update.update_norm:.3g}"
    fresh = engine(tiny).step(batch([1.0, 1.0, 0.0, 0.0]), en.GRPO())
    assert fresh.learned_nothing == FLAT and fresh.update.update_norm == 0


def test_a_learning_rate_of_0_is_the_reason(tiny: Path) -> None:
    found = engine(tiny, lr=0.0).step(batch([1.0, 0.0, 1.0, 0.0]), en.GRPO())
    assert found.update.gradient_norm > 0 and found.learned_nothing == "the learning rate is 0"


def test_a_gradient_of_0_without_a_known_reason_is_reported(tiny: Path) -> None:
    """A clip that every ratio is beyond leaves no gradient although advantages differ."""
    far = batch([1.0, 0.0, 1.0, 0.0])
    assert far.advantages is not None and far.behaviour is not None
    sign = torch.where(far.advantages > 0, -30.0, -1e-3)  # ratios far above 1 where A > 0, far below where A < 0
    found = engine(tiny).step(far.with_signals(behaviour=sign), en.GRPO())
    assert found.update.gradient_norm == 0 and found.learned_nothing == "the gradient is exactly 0"


def test_a_run_without_any_reward_warns_everywhere(tmp_path: Path, make_config: Make) -> None:
    """A random model never sorts: every reward is 0, on every step."""
    shown = io.StringIO()
    config = make_config("task=sort", "check=false", "steps=4", "eval.every=0", f"out={tmp_path / 'run'}")
    finished = start("test", config, Console(file=shown, width=400))
    warning = f"steps 1 to 3 learned nothing, because {FLAT}"
    assert f"warning: {warning}" in shown.getvalue()
    assert (tmp_path / "run" / "events.log").read_text().count(f"warning {warning}") == 1
    assert finished.problem == f"4 of 4 steps learned nothing, 4 of them in a row, because {FLAT}"
    steps = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["learned_nothing"] for line in steps] == [FLAT] * 4
    read = report.load(tmp_path / "run")
    assert read.verdict is not None and not read.verdict.holds
    (failed,) = [check for check in read.verdict.checks if check.outcome == "fails"]
    assert failed.measured == "4 of 4 had nothing to learn from" and FLAT in failed.detail
    assert "steps during training" in (tmp_path / "run" / "report.html").read_text()


def test_a_check_without_any_spread_of_rewards_is_a_sentence_about_rewards(
    tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    with pytest.raises(RunStopped, match="in 8 batches no two completions of a prompt differ in their reward") as found:
        start("test", make_config("task=sort", f"out={tmp_path / 'run'}"), quiet)
    assert "the run stopped before its first step of" in str(found.value) and "samples.jsonl" not in str(found.value)
    assert "supervised training" in str(found.value)


def test_a_negative_weight_warns(tmp_path: Path, make_config: Make) -> None:
    """GRPO with weight -1 trains the reward away; it did so without a warning."""
    shown = io.StringIO()
    config = make_config("objective.0.weight=-1", "check=false", "steps=1", "eval.every=0", f"out={tmp_path / 'run'}")
    start("test", config, Console(file=shown, width=400))
    warning = "has the weight -1, so its loss is raised instead of lowered"
    assert warning in shown.getvalue()
    assert (tmp_path / "run" / "events.log").read_text().count(warning) == 1


def test_a_run_that_learns_has_the_same_row_and_it_holds(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    finished = start("test", make_config("sampling.prompts_per_step=8", f"out={tmp_path / 'run'}"), quiet)
    found = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert finished.problem is None and found["holds"] is True
    assert [c["outcome"] for c in found["checks"] if c["subject"] == "steps during training"] == ["holds"]


def step(number: int, reason: str | None, correct: float = 0.5) -> dict[str, Any]:
    line = {"kind": "step", "step": number, "version": number, "terms": {}}
    return line | {"learned_nothing": reason, "metrics": {"correct": correct}}


@pytest.mark.parametrize(
    ("reasons", "warned", "problem"),
    [
        ([None, "x", "x", None, "x"], [], False),
        (["x", "x", "x", "x", None, "x", "x", "x"], [3, 8], True),
        (["x"], [], True),
        ([None, None], [], False),
    ],
)
def test_three_steps_in_a_row_or_all_of_them(reasons: list[str | None], warned: list[int], problem: bool) -> None:
    found = RunWatch()
    said = [number for number, why in enumerate(reasons, 1) if found.add(step(number, why))]
    assert said == warned and (found.problem() is not None) is problem
    assert RunWatch([step(n, why) for n, why in enumerate(reasons, 1)]).problem() == found.problem(), "resumed"


def test_a_solved_task_is_not_a_problem() -> None:
    assert RunWatch([step(n, "x", correct=1.0) for n in range(1, 6)]).problem() is None


def test_on_stall_stop_ends_the_run_with_exit_code_1_and_a_whole_folder(
    tmp_path: Path, make_config: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops after the third step of six, with a checkpoint, the evaluation after, the adapter and the report."""
    run = tmp_path / "run"
    config = make_config("task=sort", "check=false", "steps=6", "eval.every=0", "on_stall=stop")
    (tmp_path / "stall.yaml").write_text(dump(config))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "stall.yaml"), f"out={run}"])
    assert ended.value.code == 1
    assert "steps 1 to 3 learned nothing" in capsys.readouterr().out
    found = lines(run / "metrics.jsonl")
    assert [(line["kind"], line["step"]) for line in found] == [
        ("eval", 0), ("step", 1), ("step", 2), ("step", 3), ("eval", 3)
    ]  # fmt: skip
    header = json.loads((run / "run.json").read_text())
    assert header["status"] == "failed" and header["steps_done"] == 3 and "learned nothing" in header["reason"]
    assert (run / "checkpoints" / "step-000003").is_dir() and (run / "adapter" / "adapter_config.json").is_file()
    page = (run / "report.html").read_text()
    assert "The run failed after 3 of 6 steps" in page and 'id="watch"' in page
    again = resume(run, console=Console(file=io.StringIO()))
    assert again.exit_code == 1 and len(lines(run / "metrics.jsonl")) == 5, "a resumed run stays stopped"


def test_a_warning_at_an_evaluation_stops_the_run_and_is_evaluated_once(
    tmp_path: Path, make_config: Make, quiet: Console
) -> None:
    """Weight -1 trains the rewards away, so that the held-out reward falls."""
    config = make_config(
        "objective.0.weight=-1", "optimizer.lr=0.1", "check=false", "steps=8", "eval={every: 2, prompts: 16}",
        "sampling.prompts_per_step=8", "on_stall=stop", f"out={tmp_path / 'run'}",
    )  # fmt: skip
    finished = start("test", config, quiet)
    assert finished.stalled and finished.problem is not None
    assert finished.problem.startswith("the held-out reward fell from")
    measured = [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "eval"]
    assert measured == sorted(set(measured)) and measured[-1] < 8

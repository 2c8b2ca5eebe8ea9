"""The watch over a run: each condition warns when it should, and a healthy run gives no warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earnest import report
from earnest.report.record import EvalRecord, StepRecord
from earnest.report.watch import CONDITIONS, FALLING, RunWatch, fallen
from tests.report import folders


def step(number: int, *, terms: str = "grpo", loss: float | None = 0.0, **changes: Any) -> StepRecord:
    """A healthy step of GRPO: rewards differ, completions differ and end by themselves."""
    metrics = {"correct": 0.5, "cut_off": 0.1, "entropy": 0.4, "groups_without_spread": 0.2, "groups_identical": 0.1}
    made = {t: {"weight": 1.0, "ran": t, "loss": loss, "surrogate": t == "grpo"} for t in terms.split()}
    line = {"step": number, "version": number, "terms": made, "loss": loss, "grad_norm": 0.3, "update_norm": 0.1}
    line |= {"learned_nothing": changes.pop("learned_nothing", None), "reward": {"mean": 0.5, "sd": 0.5, "n": 64}}
    return StepRecord.model_validate(line | {"metrics": metrics | changes})


def evaluation(number: int, means: list[float], measure: str = "reward") -> EvalRecord:
    value = sum(means) / len(means)
    line = {"step": number, "version": number, "measure": measure, measure: value, "se": 0.03}
    return EvalRecord.model_validate(line | {"prompts": len(means), "n": len(means), "means": means})


SICK: dict[str, list[StepRecord]] = {
    "nothing to learn from": [
        step(n, learned_nothing="the gradient is exactly 0", groups_without_spread=1.0) for n in range(1, 4)
    ],
    "no spread of rewards": [step(n, terms="grpo kl", groups_without_spread=1.0) for n in range(1, 4)],
    "rewards at their maximum": [step(n, correct=1.0, learned_nothing="x", entropy=0.0) for n in range(1, 11)],
    "collapsed entropy": [step(n, entropy=0.002) for n in range(1, 6)],
    "entropy near that of random tokens": [
        step(1),
        *(step(n, entropy=5.2, entropy_of_random_tokens=5.6, correct=0.0) for n in range(2, 7)),
    ],
    "identical completions": [step(n, groups_identical=1.0) for n in range(1, 4)],
    "completions cut off": [step(n, cut_off=1.0) for n in range(1, 4)],
    "constant loss": [step(n, terms="sft", loss=2.5) for n in range(1, 7)],
}


@pytest.mark.parametrize("name", list(SICK))
def test_each_condition_warns_once_with_its_last_step(name: str) -> None:
    """It warns with the step that completes the sequence, alone, and not again while the sequence goes on."""
    steps = SICK[name]
    found = RunWatch()
    warned = [found.add(one) for one in steps]
    assert [len(one) for one in warned] == [0] * (len(steps) - 1) + [1]
    (streak,) = [s for s in found.streaks if s.warned]
    assert streak.condition.name == name and streak.warned == [steps[-1].step]
    assert warned[-1][0].startswith(f"steps {steps[-1].step - streak.condition.steps + 1} to {steps[-1].step} ")
    further = steps[-1].model_copy(update={"step": steps[-1].step + 1})
    assert found.add(further) == [] and streak.longest == streak.condition.steps + 1
    failing = [c["subject"] for c in found.checks() if c["outcome"] == "fails"]
    assert len(failing) == streak.condition.fails, failing


@pytest.mark.parametrize("name", list(SICK))
def test_one_healthy_step_begins_the_count_again(name: str) -> None:
    steps = SICK[name]
    half = len(steps) // 2
    healthy = step(half + 1, terms="sft", loss=1.0) if name == "constant loss" else step(half + 1)
    assert RunWatch([*steps[:half], healthy, *steps[half + 1 :]]).warnings == []


def test_the_table_of_conditions_is_tested_completely() -> None:
    assert [c.name for c in CONDITIONS] == list(SICK)


@pytest.mark.parametrize(
    "steps",
    [
        [step(n, correct=1.0, learned_nothing="x", groups_identical=1.0, entropy=0.001) for n in range(1, 10)],
        [step(n, correct=0.95, entropy=0.005, groups_identical=1.0) for n in range(1, 20)],
        [step(n, terms="distill", loss=1 / n, groups_without_spread=1.0) for n in range(1, 20)],
        [step(n, terms="grpo barrier", loss=0.0) for n in range(1, 20)],
        [step(n, entropy=5.5, entropy_of_random_tokens=5.6) for n in range(1, 20)],
        [step(1), *(step(n, entropy=5.0, entropy_of_random_tokens=5.6) for n in range(2, 20))],
        [step(n, terms="sft", loss=2.5 * (1 - 1e-5) ** n) for n in range(1, 20)],
    ],
    ids=[
        "nearly solved",
        "a good policy is certain",
        "no term reads rewards",
        "an inactive barrier",
        "random from the start",
        "varied text",
        "a small rate",
    ],
)
def test_what_looks_alike_and_is_healthy_gives_no_warning(steps: list[StepRecord]) -> None:
    assert RunWatch(steps).warnings == []


def measured(*pairs: tuple[float, float]) -> list[StepRecord | EvalRecord]:
    """(the training reward, the held-out reward after it), every 10 steps; held-out rewards without means."""
    lines: list[StepRecord | EvalRecord] = []
    for i, (own, heldout) in enumerate(pairs):
        lines.append(step(10 * i).model_copy(update={"reward": step(1).reward.model_copy(update={"mean": own})}))  # type: ignore[union-attr]
        lines.append(evaluation(10 * i, [heldout]).model_copy(update={"means": None}))
    return lines


def test_a_held_out_reward_that_falls_is_reported() -> None:
    fell = fallen(measured((0.5, 0.45), (0.7, 0.90), (0.9, 0.51)))
    assert fell == (
        "the held-out reward fell from 0.900 at step 10 to 0.510 at step 20, "
        "while the training reward went from 0.700 to 0.900"
    )
    assert fallen(measured((0.5, 0.45), (0.7, 0.90), (0.9, 0.84))) is None, "two standard errors of the difference"
    assert fallen(measured((0.5, 0.9))) is None


def test_the_standard_error_is_that_of_each_prompts_difference() -> None:
    """All prompts fall by the same amount: the difference has no spread, so a small fall is certain."""
    best, last = [0.2, 0.5, 0.9, 0.6], [0.1, 0.4, 0.8, 0.5]
    assert fallen([evaluation(0, best), evaluation(10, last)]) is not None
    assert fallen([evaluation(0, best), evaluation(10, [0.6, 0.1, 0.9, 0.2])]) is None


def test_a_loss_is_worse_when_it_is_larger() -> None:
    steps = [step(n, terms="sft", loss=2.0 / n).model_copy(update={"reward": None}) for n in (1, 2)]
    low, high = [1.0, 2.0, 3.0], [1.5, 2.5, 3.5]
    assert fallen([evaluation(0, high, "loss"), steps[0], evaluation(1, low, "loss")]) is None
    assert fallen([steps[0], evaluation(1, low, "loss"), steps[1], evaluation(2, high, "loss")]) == (
        "the held-out loss rose from 2.000 at step 1 to 2.500 at step 2, "
        "while the training loss went from 2.000 to 1.000"
    )


def test_a_fall_warns_once_and_takes_the_given_advice() -> None:
    best, last = [0.2, 0.5, 0.9, 0.6], [0.1, 0.4, 0.8, 0.5]
    found = RunWatch(advice={FALLING: "Do that."})
    warned = [found.add(evaluation(n, m)) for n, m in enumerate([best, last, last, best, last])]
    assert [len(one) for one in warned] == [0, 1, 0, 0, 1] and warned[1][0].endswith("to 0.450 at step 1. Do that.")


def test_the_report_has_a_section(tmp_path: Path) -> None:
    folder = folders.make(tmp_path / "run")
    healthy = report.write(folder).read_text()
    assert 'href="#watch"' in healthy and "completions cut off" in healthy and "step 12" not in healthy
    made = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in made:
        if line["kind"] == "step" and 10 <= line["step"] <= 12:
            line["metrics"]["cut_off"] = 1.0
    folders.write_lines(folder / "metrics.jsonl", made)
    sick = report.write(folder).read_text()
    assert "steps 10 to 12 cut off every completion at sampling.max_new_tokens" in sick
    assert "<td>3 of 60 steps, at most 3 in a row</td>" in sick


def test_the_report_counts_the_evaluations_that_are_worse_than_the_best(tmp_path: Path) -> None:
    """An improving loss has none, whatever the number of evaluations is."""
    folder = folders.make(tmp_path / "run")
    steps = [
        line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "step"
    ]

    def row(*losses: float) -> str:
        made = [evaluation(n, [x, x + 1, x + 2], "loss").model_dump(mode="json") for n, x in enumerate(losses)]
        folders.write_lines(folder / "metrics.jsonl", [*steps, *made])
        return report.write(folder).read_text().partition(f"{FALLING}</th>")[2].partition("</tr>")[0]

    improving = row(4.0, 3.0, 2.0, 1.0)
    assert "<td>no evaluation</td>" in improving and "never" in improving
    worse = row(4.0, 1.0, 2.0, 2.5)
    assert "<td>2 of 4 evaluations</td>" in worse and "step 2<" in worse

"""A run on an environment of several turns: training, evaluation, records and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import earnest as en
from earnest.errors import ConfigError, EarnestError
from earnest.report import load, render
from earnest.report.markup import number
from earnest.rollouts import collecting
from tests.rollouts.worlds import Echo

QUIET = Console(quiet=True)
WORLDS = Path(__file__).parents[1] / "rollouts" / "worlds.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0))
    place = tmp_path_factory.mktemp("runs") / "talk"
    world = en.get_task(f"{WORLDS}:Echo", {"turns": 2})
    en.train(
        engine,
        world,
        en.GRPO(),
        steps=2,
        out=place,
        sampling={"prompts_per_step": 2, "completions_per_prompt": 3, "max_new_tokens": 12},
        turns={"max_turns": 3, "credit": "turn", "discount": 0.9},
        eval={"every": 0, "prompts": 4, "samples": 2},
        console=QUIET,
    )
    return place


def test_metrics_have_the_ends_of_conversations(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["eval", "step", "step", "eval"]
    for line in lines:
        shares = {k: v for k, v in line["metrics"].items() if k.startswith("ended/")}
        assert set(shares) == {"ended/answered", "ended/turn_limit", "ended/token_limit", "ended/tool_failure"}
        assert sum(shares.values()) == pytest.approx(1)
    assert json.loads((folder / "verdict.json").read_text())["holds"]


def test_the_report_marks_what_was_trained(folder: Path) -> None:
    run = load(folder)
    samples = [s for s in run.samples if s.phase == "after"]
    assert samples and all(s.segments and s.ending for s in samples)
    first = samples[0]
    assert sum(s.tokens for s in first.segments if s.author == "policy") == first.tokens
    page = render(run)
    assert 'id="conversations"' in page
    assert page.count('class="segment policy"') == sum(s.author == "policy" for a in samples for s in a.segments)
    rewarded = next(s for s in samples if any(s.turn_rewards))
    assert f"rewards of the turns: {', '.join(number(r, 3) for r in rewarded.turn_rewards)}" in page
    for ending in {str(s.ending) for s in samples[:6]}:
        assert f"ended: {ending.replace('_', ' ')}" in page
    for evaluation in (run.evaluations[0], run.evaluations[-1]):
        shares = {k.removeprefix("ended/"): v for k, v in evaluation.metrics.items() if k.startswith("ended/")}
        line = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares.items() if share)
        assert line and f"<li>step {evaluation.step}: {line}</li>" in page


def test_turns_are_refused_for_a_task_of_one_turn(tmp_path: Path) -> None:
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0))
    with pytest.raises(ConfigError, match="turns: sort has one turn; leave turns out"):
        en.train(engine, "sort", en.GRPO(), steps=1, out=tmp_path / "run", turns={"max_turns": 3}, console=QUIET)


def test_built_in_environments_are_tasks() -> None:
    for name in ("calculator", "lookup", "fix"):
        assert en.get_task(name).name == name
    assert Echo().name == "echo"


def test_the_check_goes_on_with_hints_where_every_reward_is_0(tmp_path: Path) -> None:
    """nano never calls the calculator, so no pair has rows: law GL could not measure SimPO alone, and the run ended."""
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0))
    out = tmp_path / "run"
    en.train(
        engine,
        "calculator",
        en.GRPO() + en.SDPO() + en.SimPO(),
        steps=1,
        out=out,
        sampling={"prompts_per_step": 2, "completions_per_prompt": 2, "max_new_tokens": 12},
        turns={"max_turns": 2},
        eval={"every": 0, "prompts": 2, "samples": 1},
        console=QUIET,
    )
    assert json.loads((out / "verdict.json").read_text())["holds"]
    assert (
        "so the other terms alone are checked (sdpo). If every reward is 0, begin with supervised training"
        in (out / "events.log").read_text()
    )


def test_a_warm_start_needs_room_for_the_longest_turn_of_the_oracle(tmp_path: Path) -> None:
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0))
    short = {"prompts_per_step": 2, "max_new_tokens": 20}
    with pytest.raises(
        ConfigError, match=r"a turn of the oracle of calculator has \d\d tokens .*; set at least \d\d\."
    ):
        en.train(engine, "calculator", en.SFT(), steps=1, out=tmp_path / "run", sampling=short, console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_run_ends_before_training_if_a_law_of_conversations_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is one that the check of every batch does not see: later turns count half."""
    right = collecting.rollout_rows

    def halved(*given: Any) -> Any:
        made = []
        for row in right(*given):
            weights = [*(row.weights or (1.0,) * len(row.tokens)), 0.0]
            first = weights.index(0.0)
            kept = [w / 2 if i > first and weights[i + 1] else w for i, w in enumerate(weights[:-1])]
            made.append(replace(row, weights=tuple(kept)))
        return made

    monkeypatch.setattr(collecting, "rollout_rows", halved)
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0))
    with pytest.raises(EarnestError, match="turns in rows of their own"):
        en.train(
            engine,
            en.get_task(f"{WORLDS}:Echo", {"turns": 2}),
            en.DAPO(),
            steps=1,
            out=tmp_path / "run",
            sampling={"prompts_per_step": 2, "completions_per_prompt": 3, "max_new_tokens": 12},
            turns={"max_turns": 3},
            eval={"every": 0, "prompts": 2, "samples": 1},
            console=QUIET,
        )
    assert engine.version == 0
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert {f["law"] for f in verdict["checks"] if f["outcome"] == "fails"} == {"TURNS"}

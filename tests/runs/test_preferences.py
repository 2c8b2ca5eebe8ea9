"""Preference pairs from a file: which rows a step gets, in which order, what is held out, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from earnest.config import RunConfig
from earnest.errors import CheckpointError, ConfigError
from earnest.replay import pairs as files
from earnest.rollouts import PairTokens
from earnest.runs import resume, start
from earnest.runs.collect import BatchSource
from earnest.runs.preferences import Preferences, held_out
from earnest.runs.setup import Setup, build
from tests.replay.records import call, pair

Make = Callable[..., RunConfig]
DPO = "objective=[{kind: dpo}]"
N = 30


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Answers with and without an exclamation mark; which is chosen is the same in every pair."""
    made = [pair(f"yes {i}!", f"no {i}.", prompt=f"say {i}", trace=f"t{i}") for i in range(N)]
    files.write(tmp_path / "pairs.parquet", made, {})
    return tmp_path / "pairs.parquet"


def made(make_config: Make, data: Path, *more: str) -> Setup:
    return build(make_config(DPO, f"data={data}", *more), lambda _: None)


def test_a_step_has_the_files_rows_chosen_before_rejected(make_config: Make, data: Path) -> None:
    setup = made(make_config, data)
    found = BatchSource(setup).next(1)
    batch = found.batch
    assert found.attempts == () and batch.behaviour is None, "nothing is sampled for pairs of a file"
    assert batch.role == ("chosen", "rejected") * 2 and batch.pair.tolist() == [0, 0, 1, 1]
    assert batch.correct is not None and batch.correct.tolist() == [True, False] * 2
    text = [setup.policy.decode(batch.targets[r][batch.weight[r] != 0].tolist()) for r in range(4)]
    for chosen, rejected in zip(text[::2], text[1::2], strict=True):
        assert chosen.startswith("yes") and chosen.endswith("!") and rejected == chosen.replace("yes", "no")[:-1] + "."
    last = [int(batch.targets[r][batch.weight[r] != 0][-1]) for r in range(4)]
    assert set(last) <= setup.policy.eos_ids, "an answer learns to stop"


def test_the_order_is_an_epoch_without_repetition_and_the_seeds(make_config: Make, data: Path) -> None:
    preferences = made(make_config, data).preferences
    assert preferences is not None
    size = len(preferences.train)
    first, second = (preferences.at(0, "train", epoch * size, size) for epoch in (0, 1))
    assert set(first) == set(second) == set(preferences.train) and first != second
    assert preferences.at(0, "train", 3, 4) == first[3:7]
    assert preferences.at(1, "train", 0, size) != first != preferences.at(0, "check", 0, size)


def test_a_tenth_of_the_traces_is_held_out_by_name(make_config: Make, data: Path) -> None:
    preferences = made(make_config, data).preferences
    assert preferences is not None
    assert len(preferences.heldout) == sum(held_out(f"t{i}") for i in range(N)) > 0
    assert not set(preferences.heldout) & set(preferences.train)
    assert 0.05 < sum(held_out(f"trace {i}") for i in range(2000)) / 2000 < 0.15


def test_accuracy_and_margin_by_hand(make_config: Make, data: Path) -> None:
    """Against the model's own logits, one answer at a time."""
    import torch

    setup = made(make_config, data)
    preferences = setup.preferences
    assert preferences is not None

    def mean(prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        with torch.no_grad():
            logits = setup.policy.model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
        return sum(float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(answer)) / len(answer)

    margins = [mean(t.prompt, t.chosen) - mean(t.prompt, t.rejected) for t in preferences.heldout]
    found = preferences.measure(setup.engine)
    assert found["pairs/margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert found["pairs/accuracy"] == sum(m > 0 for m in margins) / len(margins)


def test_a_run_prefers_what_was_chosen_and_says_which_file(
    tmp_path: Path, make_config: Make, quiet: Console, data: Path
) -> None:
    options = (
        "steps=12",
        "sampling.prompts_per_step=8",
        "eval.every=0",
        "optimizer.lr=0.02",
        f"out={tmp_path / 'run'}",
    )
    folder = start("test", make_config(DPO, f"data={data}", *options), quiet).folder
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = (x["metrics"] for x in lines if x["kind"] == "eval")
    assert after["pairs/margin"] > before["pairs/margin"] + 0.1
    steps = [x for x in lines if x["kind"] == "step"]
    assert all("reward" not in x for x in steps) and steps[-1]["loss"] < steps[0]["loss"] == pytest.approx(
        0.6931, abs=1e-3
    )
    header = json.loads((folder / "run.json").read_text())["data"]
    assert header["pairs"] + header["heldout"] == N and header["left_out"] == 0

    files.write(data, [pair("other", trace="x"), pair("others", trace="y")], {})
    with pytest.raises(CheckpointError, match=r"has changed since .* began; use the same pairs"):
        resume(folder, ["steps=13"], quiet)


def test_pairs_that_do_not_fit_are_left_out_and_said(make_config: Make, data: Path) -> None:
    long = [pair("word " * 60, trace=f"t{i}") for i in range(N)]
    said: list[str] = []
    files.write(data, [*long[:5], pair("short", trace="t9"), pair("brief", trace="t10")], {})
    setup = build(make_config(DPO, f"data={data}"), said.append)
    assert setup.preferences is not None and setup.preferences.left_out == 5
    assert any("5 left out: longer than 128 tokens" in line for line in said)
    files.write(data, long, {})
    with pytest.raises(ConfigError, match=f"leaves no pair to train on: of {N}, {N} are longer than the context"):
        made(make_config, data)


def test_tool_calls_are_rendered_and_pairs_beside_rollouts_work(make_config: Make, data: Path, tmp_path: Path) -> None:
    import earnest as en

    policy = en.load("nano")
    from dataclasses import replace

    tool = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {"city": {}}}}}
    files.write(data, [replace(pair("x", trace="t9"), chosen=call("clock", city="Paris"), tools=(tool,))], {})
    (found,) = Preferences.load(data, policy, lambda _: None).train
    assert isinstance(found, PairTokens)
    assert policy.decode(found.chosen) == '<tool_call>{"name": "clock", "arguments": {"city": "Paris"}}</tool_call>'
    assert "Tools: clock(city)" in policy.decode(found.prompt)


def test_rollouts_and_pairs_of_a_file_share_a_batch(make_config: Make, data: Path) -> None:
    setup = build(make_config("objective=[{kind: grpo}, {kind: dpo}]", f"data={data}"), lambda _: None)
    found = BatchSource(setup).next(1)
    assert found.batch.role == ("rollout",) * 8 + ("chosen", "rejected") * 2 and len(found.attempts) == 8
    assert found.batch.behaviour is not None and found.batch.advantages is not None


def test_data_without_a_term_for_it_is_refused(make_config: Make, data: Path) -> None:
    with pytest.raises(ConfigError, match=r"no term reads the pairs of .*; add a term on preferences"):
        build(make_config(f"data={data}"), lambda _: None)
    with pytest.raises(Exception, match="there is no file"):
        build(make_config(DPO, "data=nowhere.parquet"), lambda _: None)

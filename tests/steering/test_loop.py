"""The loop on nano with tiny budgets: a round's files, resuming, and its three ways to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import earnest as en
from earnest.adapters.conformance import perturb
from earnest.errors import CheckpointError
from earnest.steering import (
    Collapsed,
    Contrast,
    Filter,
    Healing,
    SteeringError,
    SteeringWarning,
    TooFewSurvivors,
    TraitEvaluator,
    Vector,
)
from earnest.tasks.base import Task
from experiments.heal.loop import Loop, Steering
from tests.adapters.test_gates import Opaque
from tests.steering.conftest import logits

TINY = Steering(contexts=4, layers=(2, 3), nats=0.4, questions=8, enough=3, max_new_tokens=16)
QUICK = Healing(steps=3, rows=3, pressure_every=3, tau=0.05)

Make = Callable[..., Loop]


@pytest.fixture
def make(nano: en.Policy, warmth: Task, contrast: Contrast) -> Make:
    evaluator = TraitEvaluator(nano, warmth, prompts=4, probes=4, texts=2, max_new_tokens=12, floor=0.05)

    def build(folder: Path, *, policy: en.Policy = nano, **changes: Any) -> Loop:
        settings: dict[str, Any] = {"steering": TINY, "healing": QUICK, "targets": ("q_proj", "v_proj")} | changes
        return Loop(policy, warmth, contrast, evaluator, folder, **settings)

    return build


def without_time(record: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({k: v for k, v in record.items() if k != "seconds"}))


def test_two_rounds_in_one_go_and_in_two_are_the_same(make: Make, nano: en.Policy, tmp_path: Path) -> None:
    prompt = nano.render([{"role": "user", "content": "Describe the fox."}])
    plain = logits(nano, prompt)
    said: list[str] = []
    whole = make(tmp_path / "whole", say=said.append)
    before = whole.evaluator.measure()
    done = whole.run(2, before)
    student = logits(nano, prompt)
    assert done.stopped is None and len(done.records) == 2 and len(said) == 2 and not torch.equal(student, plain)
    with torch.no_grad():  # the first round alone, by gates
        whole.history[1].scale = 0.0
        assert not torch.equal(logits(nano, prompt), student)
        whole.history[0].scale = 0.0
        assert torch.equal(logits(nano, prompt), plain), "with every gate at 0 it is the base, bit for bit"
        for adapter in whole.history:
            adapter.scale = 1.0
    whole.close()
    assert torch.equal(logits(nano, prompt), plain)

    first = make(tmp_path / "parts")
    first.run(1, before)
    first.close()
    second = make(tmp_path / "parts")
    assert len(second.history) == 1 and not second.history[0].parameters(), "history came back frozen"
    again = second.run(2, before)
    torch.testing.assert_close(logits(nano, prompt), student, rtol=0, atol=0)
    second.close()
    assert [without_time(r) for r in again.records] == [without_time(r) for r in done.records]


def test_what_a_round_records(make: Make, tmp_path: Path) -> None:
    loop = make(tmp_path)
    record = loop.round()
    loop.close()
    assert record == json.loads((tmp_path / "round-1" / "record.json").read_text())
    for who in ("steered", "healed"):
        assert {"trait", "mass", "fluency", "sense", "coherence", "score", "answers"} <= set(record[who])
    assert record["vector"]["cosine_first"] == pytest.approx(1.0) and record["heal"]["pressure"] >= 0
    assert {"good", "broken", "auc", "separates"} <= set(record["filter"]) and record["samples"]
    assert (
        record["dose"]["kl"] == pytest.approx(0.4, rel=0.06) and record["tries"][-1]["survived"] == record["survivors"]
    )
    assert Vector.load(tmp_path / "round-1" / "vector.safetensors").norm == pytest.approx(record["vector"]["norm"])


def test_round_one_warns_if_the_filter_does_not_separate(make: Make, tmp_path: Path) -> None:
    """Limits that pass everything do not separate, which is a warning."""
    said: list[str] = []
    loose = Filter(tail_perplexity=1e9, word_repetition=1.0, char_repetition=1.0, narration=(), refusal=())
    loop = make(tmp_path, limits=loose, say=said.append)
    try:
        with pytest.warns(SteeringWarning, match="does NOT separate: it passes 100% of the good"):
            loop.round()
    finally:
        loop.close()
    assert "the filter does NOT separate" in said[0]


def test_a_dose_may_be_measured_from_the_base(make: Make, nano: en.Policy, tmp_path: Path) -> None:
    """For a trained student, the same nats measured from the base give a smaller dose."""
    used = {}
    for against in ("student", "base"):
        loop = make(tmp_path / against, steering=replace(TINY, against=against, nats=3.0, tries=12))
        history = en.attach(nano, en.LoRA(rank=4), targets=("q_proj", "v_proj"))
        perturb(history, std=0.05)
        history.freeze()
        loop.history.append(history)
        used[against] = loop.sample_survivors(2)[1]
        loop.close()
    assert used["base"].tried[0][1] > 0 == used["student"].tried[0][1], "at no dose at all"
    assert used["base"].coefficient != used["student"].coefficient
    with pytest.raises(SteeringError, match="against: must be 'student' or 'base', got 'nobody'"):
        Steering(against="nobody")


def test_history_on_a_quantised_layer_stays_unmerged(make: Make, tmp_path: Path) -> None:
    policy = en.load("nano")
    for block in policy.model.model.layers:
        block.self_attn.q_proj = Opaque(block.self_attn.q_proj)
    policy = en.Policy.of(policy.model, policy.tokenizer)
    loop = make(tmp_path, policy=policy)
    history = en.attach(policy, en.LoRA(rank=4), targets=("q_proj", "v_proj"))
    perturb(history)
    history.freeze()
    plain = loop.extract(2)
    loop.history.append(history)
    torch.testing.assert_close(loop.extract(2).norm, plain.norm)


def test_the_coherence_floor_stops_it(make: Make, tmp_path: Path) -> None:
    loop = make(tmp_path)
    loop.evaluator.floor = 0.9
    sane = replace(loop.evaluator.measure(), mass=1.0)
    wild = make(tmp_path / "wild", healing=Healing(steps=8, rows=3, tau=1e6), optimizer=en.AdamW(lr=0.3))
    ended = wild.run(3, sane)
    wild.close()
    assert len(ended.records) == 1 and ended.stopped is not None
    assert "below the floor of 0.9" in ended.stopped
    assert ended.records[0]["healed"]["score"] == 0
    again = make(tmp_path / "wild")
    assert again.run(3, sane).stopped == ended.stopped, "a stopped loop stays stopped"
    again.close()
    with pytest.raises(Collapsed, match="before steering"):
        loop.run(1, replace(sane, mass=0.1))


def test_a_loop_with_too_few_survivors_raises_and_writes_no_round(make: Make, tmp_path: Path) -> None:
    loop = make(tmp_path, limits=Filter(tail_perplexity=1.0001), steering=replace(TINY, tries=2))
    with pytest.raises(TooFewSurvivors, match="3 steered samples have to survive"):
        loop.round()
    loop.close()
    assert not (tmp_path / "round-1" / "record.json").exists()


def test_a_damaged_record_is_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "round-1").mkdir()
    (tmp_path / "round-1" / "record.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"remove .*round-1"):
        make(tmp_path)


def test_settings_are_checked() -> None:
    with pytest.raises(SteeringError, match=r"method: must be .*, got 'median'"):
        Steering(method="median")
    with pytest.raises(SteeringError, match="enough is 9; with 8 questions"):
        Steering(questions=8, enough=9)
    with pytest.raises(SteeringError, match="overdose: must be a finite number above 1, got 1"):
        Steering(overdose=1.0)

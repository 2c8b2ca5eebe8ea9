"""One round of `earnest run heal-smollm2`, small: other blocks, other tokens, the same record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import experiments
from earnest.config import recipes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::earnest.steering.errors.SteeringWarning"),  # four answers separate nothing
]

SMALL = [
    "rounds=1",
    "steering.contexts=2",
    "steering.questions=4",
    "steering.enough=1",
    "steering.max_new_tokens=8",
    "healing.steps=2",
    "healing.rows=1",
    "eval.prompts=2",
    "eval.probes=2",
    "eval.texts=1",
    "eval.floor=0.001",
]


def test_a_round_on_smollm2(tmp_path: Path) -> None:
    name, data = recipes.read("heal-smollm2")
    overrides = [*SMALL, f"out={tmp_path}"]
    experiments.run(name, data, overrides, full=False, resume=False, console=Console(quiet=True))
    (arm,) = json.loads((tmp_path / "results.json").read_text())["arms"]
    (record,) = arm["runs"][0]["rounds"]
    assert record["dose"]["kl"] == pytest.approx(1.2, rel=0.06) and record["heal"]["nll_last"] > 0
    assert record["survivors"] >= 1 and 0 < record["healed"]["mass"] <= 1

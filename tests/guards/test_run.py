"""``guard:`` in a recipe: it takes effect; evaluation and the saved adapter are ablated; it resumes and is audited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from earnest.config import RunConfig
from earnest.config.loading import from_mapping
from earnest.config.schema import GuardConfig
from earnest.errors import ConfigError
from earnest.guards import Directions
from earnest.runs import evaluate as evaluation
from earnest.runs import start
from earnest.runs.setup import build

QUIET = Console(quiet=True)


def config(data: dict[str, object], **changes: object) -> RunConfig:
    return from_mapping(data | changes)


@pytest.mark.filterwarnings("ignore::earnest.guards.errors.GuardWarning")
def test_a_guarded_run(data: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routed = start("test", config(data, out=str(tmp_path / "route")), QUIET)
    free = start("test", config(data, guard=None, out=str(tmp_path / "none")), QUIET)

    def rewards(folder: Path) -> list[float]:
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        return [x["reward"]["mean"] for x in lines if x["kind"] == "step"]

    assert rewards(routed.folder) == rewards(free.folder), "Route has the rewards of the unguarded run"
    steps = [json.loads(x) for x in (routed.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [x["metrics"] for x in steps if x["kind"] == "step"]
    assert metrics[-1]["guard/quarantine"] > 0 and metrics[-1]["guard/leak_update"] < 1e-6
    assert "guard/overlap" in metrics[2] and "guard/overlap" not in metrics[1]
    kept = load_file(routed.folder / "checkpoints/step-000004/engine/tensors.safetensors")
    saved = build(config(data), lambda _: None)
    saved.engine.load(routed.folder / "checkpoints/step-000004/engine")
    with saved.deployed():
        main = {name: tensor.clone() for name, tensor in saved.adapter.state_dict().items()}
    measured: list[dict[str, torch.Tensor]] = []
    real = evaluation.attempt

    def attempt(setup: Any, *words: Any) -> Any:
        measured.append({name: tensor.clone() for name, tensor in setup.adapter.state_dict().items()})
        return real(setup, *words)

    monkeypatch.setattr(evaluation, "attempt", attempt)
    evaluation.evaluate(saved, 4)
    assert all(torch.equal(measured[0][n], main[n]) for n in main), "held-out rewards are those without the quarantine"
    from earnest.adapters import load_adapter
    from earnest.models import load

    written = load_adapter(load(data["model"]), routed.adapter).state_dict()
    assert all(torch.equal(written[n], main[n]) for n in main), "the adapter on disk is the ablated one"
    assert any(not torch.equal(written[n], kept[f"adapter.{n}"]) for n in main), "and not the total"
    assert "guarded by Route at the update" in json.loads((routed.folder / "run.json").read_text())["adapter"]


def test_directions_from_a_file_and_every_setting(data: dict[str, object], tmp_path: Path) -> None:
    made = build(config(data), lambda _: None).engine.guard.directions  # type: ignore[union-attr]
    made.save(tmp_path / "v.safetensors")
    guard = {"kind": "erase", "directions": str(tmp_path / "v.safetensors"), "gate": "two_sided", "overshoot": 1.1}
    setup = build(config(data, guard=guard | {"preserve": True, "at": "gradient"}), lambda _: None)
    found = setup.engine.guard
    assert (found.rule.gate, found.rule.overshoot, found.rule.preserve, found.at) == (
        "two_sided",
        1.1,
        True,
        "gradient",
    )
    assert isinstance(found.directions, Directions) and len(found.directions) == len(made)
    fewer = build(config(data, guard=dict(data["guard"], top=1, floor=0.5, refresh=0)), lambda _: None).engine.guard
    assert 0 < len(fewer.directions) < len(made)


def test_every_field_is_read(data: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    chosen = config(data)
    look = GuardConfig.__getattribute__

    def watch(self: GuardConfig, name: str) -> object:
        read.add(name)
        return look(self, name)

    monkeypatch.setattr(GuardConfig, "__getattribute__", watch)
    build(chosen, lambda _: None)
    assert set(GuardConfig.model_fields) <= read


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ({"kind": "route"}, "directions .a file of them. or triples"),
        ({"kind": "route", "directions": "v", "refresh": 2}, "needs triples"),
        ({"kind": "rout", "directions": "v"}, "guard.kind"),
    ],
)
def test_mistakes(data: dict[str, object], guard: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(data, guard=guard)

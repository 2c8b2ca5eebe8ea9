"""A guarded run of two replicas that exchange updates: the quarantine is averaged, and the run equals the unguarded
one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from earnest.config.loading import from_mapping
from earnest.diloco.executors.base import EXECUTORS
from earnest.diloco.launch import start
from earnest.engines.checkpoint import read
from earnest.errors import ConfigError
from earnest.runs.setup import build
from tests.diloco.forked import ForkExecutor


@pytest.fixture
def data(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The guarded recipe for two replicas, which may not refresh; decay, so that it is in what is compared."""
    monkeypatch.setitem(EXECUTORS, "fork", "tests.diloco.forked:ForkExecutor")
    monkeypatch.setattr(ForkExecutor, "kill", {})
    return data | {
        "optimizer": data["optimizer"] | {"weight_decay": 0.1},
        "sampling": data["sampling"] | {"max_new_tokens": 6},
        "checkpoint": {"every": 1, "keep": 2},
        "replicas": 2,
        "sync": {"every": 2},
        "guard": {"kind": "route", "triples": data["guard"]["triples"], "top": 3},
    }


def trained(data: dict[str, Any], folder: Path, **changes: Any) -> list[dict[str, Tensor]]:
    """The last state of each replica."""
    config = from_mapping(data | changes | {"out": str(folder)})
    start("test", config, Console(file=io.StringIO(), width=200), on="fork")
    places = [max((folder / f"replica-{i}" / "checkpoints").glob("step-*")) / "engine" for i in range(2)]
    return [read(place)[0] for place in places]


def part(state: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    return {k.removeprefix(owner): v for k, v in state.items() if k.startswith(owner)}


@pytest.mark.integration
def test_two_replicas_with_route_are_two_replicas_without(data: dict[str, Any], tmp_path: Path) -> None:
    """Totals bit for bit, one quarantine for both, and the adapter on disk is total minus quarantine."""
    free, routed = trained(data, tmp_path / "free", guard=None), trained(data, tmp_path / "route")
    for mine, other in zip(free, routed, strict=True):
        ours, theirs = part(mine, "adapter."), part(other, "adapter.")
        assert ours and all(torch.equal(v, theirs[k]) for k, v in ours.items()), "Route changed the training"
    first, second = (part(state, "guard.quarantine.") for state in routed)
    assert first and all(torch.equal(v, second[k]) for k, v in first.items()), "the replicas' quarantines differ"
    assert any(float(v.norm()) > 1e-3 for v in first.values()), "nothing was set aside"
    total, written = part(routed[0], "adapter."), load_file(tmp_path / "route" / "adapter/earnest_adapter.safetensors")
    for name, q in first.items():
        torch.testing.assert_close(written[name], (total[name].double() - q.double()).float(), rtol=0, atol=1e-7)


def test_refreshing_apart_is_refused(data: dict[str, Any], tmp_path: Path) -> None:
    config = from_mapping(data | {"guard": data["guard"] | {"refresh": 3}, "out": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="2 replicas have different parameters"):
        build(config, lambda _: None)

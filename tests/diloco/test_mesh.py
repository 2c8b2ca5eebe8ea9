"""A replica of several ranks: sharded inside, a bucket outside."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file as load

from earnest.config import load_file
from earnest.diloco.launch import start
from earnest.diloco.ledger import Ledger
from earnest.errors import ConfigError
from earnest.store import Bucket
from tests.diloco.processes import commits
from tests.diloco.test_launch import SMALL, steps
from tests.runs.tiny import recipe


@pytest.mark.slow
@pytest.mark.processes
def test_two_replicas_of_two_ranks_train_as_two_of_one_rank(tmp_path: Path, tiny: Path) -> None:
    """The same commits, tokens and weights, within rounding."""
    written = recipe(tmp_path / "recipe.yaml", tiny)
    folders = {}
    for shard in (1, 2):
        folder = folders[shard] = tmp_path / f"run-{shard}"
        words = ["replicas=2", "sync.wire=fp32", "sync.quorum=2", "checkpoint.every=1", f"out={folder}"]
        config = load_file(written, [*SMALL, *words, f"engine.shard={shard}"])
        start("test", config, Console(file=io.StringIO(), width=200), on="local")
    for name in ("outer/members", "outer/tokens"):
        assert [x["metrics"][name] for x in steps(folders[1])] == [x["metrics"][name] for x in steps(folders[2])]
    assert len(commits(Ledger(Bucket.open(f"file://{folders[2]}/bucket")))) == 2
    one, two = (load(folders[shard] / "adapter" / "earnest_adapter.safetensors") for shard in (1, 2))
    for key, value in one.items():
        assert torch.allclose(two[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max())), key
    for replica in range(2):
        own = folders[2] / f"replica-{replica}"
        assert (own / "ranks" / "rank-1.log").exists() and len(steps(own)) == 4  # every line once


def test_a_run_of_replicas_is_not_started_by_torchrun(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [*SMALL, "replicas=2", "engine.shard=2", f"out={tmp_path / 'r'}"]
    config = load_file(recipe(tmp_path / "recipe.yaml", tiny), words)
    with pytest.raises(ConfigError, match="each replica starts its own ranks; start this run without torchrun"):
        start("test", config, Console(file=io.StringIO()))
    assert not (tmp_path / "r").exists()

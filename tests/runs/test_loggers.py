"""Each logger writes what metrics.jsonl has, read back by the logger's own reader."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from earnest.config import RunConfig
from earnest.errors import ConfigError, MissingExtra
from earnest.runs import resume, start
from earnest.runs.loggers import flatten, open_loggers
from tests.runs.compare import lines

Make = Callable[..., RunConfig]


def rewards(folder: Path) -> dict[int, float]:
    return {x["step"]: x["reward"]["mean"] for x in lines(folder / "metrics.jsonl") if x["kind"] == "step"}


def test_flatten_keeps_numbers_under_slashed_names() -> None:
    line = {
        "kind": "step", "step": 3, "version": 3, "reward": {"mean": 0.5, "n": 8}, "lr": None, "skipped": [],
        "terms": {"grpo": {"loss": -0.25, "share": 1.0, "ran": "grpo", "metrics": {"clip_low": 0.0}}},
        "seconds": {"sample": 1.0},
    }  # fmt: skip
    assert flatten(line) == {
        "train/reward/mean": 0.5, "train/reward/n": 8.0, "train/terms/grpo/loss": -0.25,
        "train/terms/grpo/share": 1.0, "train/terms/grpo/metrics/clip_low": 0.0,
    }  # fmt: skip
    assert flatten({"kind": "eval", "step": 0, "reward": 0.3, "means": [0.1, 0.5]}) == {"heldout/reward": 0.3}


@pytest.mark.integration
def test_tensorboard_has_every_step_once_also_after_a_resume(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = f"out={tmp_path / 'run'}"
    folder = start("test", make_config("steps=3", "loggers=[tensorboard]", out), quiet).folder
    resume(folder, ["steps=5"], quiet)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    seen = {e.step: e.value for e in events.Scalars("train/reward/mean")}
    assert seen == pytest.approx(rewards(folder)) and sorted(seen) == [1, 2, 3, 4, 5]
    assert len(events.Scalars("train/reward/mean")) == 5
    assert events.Scalars("heldout/reward")[0].step == 0


@pytest.mark.integration
def test_wandb_offline(tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    folder = start("test", make_config("steps=2", "loggers=[wandb]", f"out={tmp_path / 'run'}"), quiet).folder
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 0
    found = _wandb_history(file)
    assert {s: h["train/reward/mean"] for s, h in found.items() if "train/reward/mean" in h} == rewards(folder)


def _wandb_history(file: Path) -> dict[int, dict[str, float]]:
    """The history of an offline run: a LevelDB log of blocks of 32 KiB, chunks with a header of crc (4 bytes), length
    (2) and type (1 whole, 2 first, 3 middle, 4 last), after a file header of 7 bytes; each record is a protobuf."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = file.read_bytes(), 7, b""
    found: dict[int, dict[str, float]] = {}
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.HasField("history"):
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                found[int(items["_step"])] = items
    return found


@pytest.mark.integration
def test_trackio_local(tmp_path: Path, make_config: Make, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio.utils

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    for name, module in list(__import__("sys").modules.items()):
        if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    folder = start("test", make_config("steps=2", "loggers=[trackio]", f"out={tmp_path / 'run'}"), quiet).folder
    (database,) = (tmp_path / "trackio").glob("earnest*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(m) | {"_step": s} for s, m in connection.execute("SELECT step, metrics FROM metrics")]
    assert {r["_step"]: r["train/reward/mean"] for r in rows if "train/reward/mean" in r} == pytest.approx(
        rewards(folder)
    )


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_with_its_install_line(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtra, match=rf'pip install "earnest\[{name}\]"'):
        open_loggers([name], tmp_path, {}, 0)


@pytest.mark.integration
def test_wandb_that_cannot_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"wandb could not start \(No API key configured\.\).*WANDB_MODE=offline"):
        open_loggers(["wandb"], tmp_path, {}, 0)

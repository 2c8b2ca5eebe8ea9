"""Checkpoints of a whole run: the engine's state and the loop's, in one folder that appears at once.

    checkpoints/step-000020/engine/…        what the engine writes (its own manifest of hashes inside)
    checkpoints/step-000020/loop.json       where the data streams and the JSONL files stood
    checkpoints/step-000020/manifest.json   hashes of loop.json and of the engine's manifest

A checkpoint with a missing or changed byte is set aside, reported in events.log, and the one before it is used.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from earnest.disk import sync, write_json
from earnest.engines.base import Engine
from earnest.engines.checkpoint import MANIFEST, file_hash
from earnest.engines.checkpoint import read as read_engine
from earnest.errors import CheckpointError
from earnest.runs.folder import RunFolder, read_json

ENGINE, LOOP = "engine", "loop.json"
_HASHED = (f"{ENGINE}/{MANIFEST}", LOOP)


def place(run: RunFolder, step: int) -> Path:
    return run.path / "checkpoints" / f"step-{step:06d}"


def save(run: RunFolder, engine: Engine, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of ``step`` and drop all but the newest ``keep``."""
    final = place(run, step)
    fresh = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    engine.save(fresh / ENGINE)
    write_json(fresh / LOOP, {"step": step, "lengths": run.lengths(), **state})
    write_json(fresh / MANIFEST, {name: file_hash(fresh / name) for name in _HASHED})
    if final.exists():
        shutil.rmtree(final)  # the same step again after a resume: the same bits
    fresh.rename(final)
    sync(final.parent)
    for old in _whole(run)[keep:]:
        shutil.rmtree(old)
    return final


def newest(run: RunFolder) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is what was written, or None. Torn ones are set aside and reported in events.log."""
    for folder in _whole(run):
        try:
            state = _verify(run, folder)
        except CheckpointError as error:
            run.event("warning", f"checkpoint {folder.name} is torn ({error}); using the one before it")
            aside = folder.with_name(f"{folder.name}.torn")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            continue
        return folder, state
    return None


def _whole(run: RunFolder) -> list[Path]:
    """Checkpoint folders by their names, newest first."""
    found = (run.path / "checkpoints").glob("step-*")
    return sorted((f for f in found if f.is_dir() and f.name.removeprefix("step-").isdigit()), reverse=True)


def _verify(run: RunFolder, folder: Path) -> dict[str, Any]:
    hashes = read_json(folder / MANIFEST)
    for name in _HASHED:
        path = folder / name
        if not path.is_file() or file_hash(path) != hashes.get(name):
            raise CheckpointError(f"{name} is missing or not the file that was written")
    read_engine(folder / ENGINE)
    state = read_json(folder / LOOP)
    for lines in (run.metrics, run.samples):
        if lines.length() < state["lengths"][lines.path.name]:
            raise CheckpointError(f"{lines.path.name} is shorter than the checkpoint remembers")
    return state

"""Checkpoints of a whole run: the state of the engine and of the loop, in one folder that is renamed into place.

    checkpoints/step-000020/engine/…        what the engine writes, with its own manifest of hashes
    checkpoints/step-000020/loop.json       position of the prompt stream, lengths of the JSONL files
    checkpoints/step-000020/manifest.json   hashes of loop.json and of the engine's manifest

A checkpoint whose files do not match their hashes is renamed to ``….torn`` and reported in events.log. The run then
uses the previous one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from earnest.disk import sync, write_json
from earnest.engines.base import Engine
from earnest.engines.checkpoint import MANIFEST, file_hash
from earnest.engines.checkpoint import verify as verify_engine
from earnest.errors import CheckpointError
from earnest.runs.folder import RunFolder, read_json

ENGINE, LOOP = "engine", "loop.json"
_HASHED = (f"{ENGINE}/{MANIFEST}", LOOP)


def place(run: RunFolder, step: int) -> Path:
    return run.path / "checkpoints" / f"step-{step:06d}"


def save(run: RunFolder, engine: Engine, step: int, state: dict[str, Any], keep: int, best: int | None = None) -> Path:
    """Write the checkpoint of ``step`` and drop all but the newest ``keep`` and that of the step ``best``. Every rank
    calls this; rank 0 has the run folder."""
    final = place(run, step)
    fresh = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    if engine.local is not None and engine.local.mesh.rank != 0:
        engine.save(fresh / ENGINE)
        return final
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    engine.save(fresh / ENGINE)
    write_json(fresh / LOOP, {"step": step, "lengths": run.lengths(), **state})
    write_json(fresh / MANIFEST, {name: file_hash(fresh / name) for name in _HASHED})
    if final.exists():
        shutil.rmtree(final)  # a resumed run repeats this step with the same bits
    fresh.rename(final)
    sync(final.parent)
    for old in _whole(run)[keep:]:
        if best is None or old != place(run, best):
            shutil.rmtree(old)
    return final


def newest(run: RunFolder) -> tuple[Path, dict[str, Any]] | None:
    """The folder and the loop state of the newest checkpoint that matches its hashes, or None. Others are set aside."""
    for folder in _whole(run):
        try:
            state = _verify(run, folder)
        except CheckpointError as error:
            run.event("warning", f"checkpoint {folder.name} is damaged ({error}); using the previous one")
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
            raise CheckpointError(f"{name} is missing, or its hash does not match")
    verify_engine(folder / ENGINE)
    state = read_json(folder / LOOP)
    for name, length in state["lengths"].items():
        path = run.path / name
        if not path.is_file() or path.stat().st_size < length:
            raise CheckpointError(f"{name} is shorter than when the checkpoint was written")
    return state

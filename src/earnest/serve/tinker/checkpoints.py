"""Training runs and their checkpoints: rows in the server's database, weights in folders beside it.

    <data>/tinker/<run>/weights/<name>@<id>/           a state: adapter and optimizer, as LocalEngine writes it
    <data>/tinker/<run>/sampler_weights/<name>@<id>/   an adapter in PEFT's format and our exact one

A checkpoint exists when the database lists its folder, and it is listed after its files are written and synced. One
that overwrites another has a folder of its own; the old folder is deleted after the commit. So a process that dies at
any moment leaves the old checkpoint or the new one, whole; folders that are not listed are deleted at the next start.

The first edition listed a run's checkpoints in <run>/run.json; such files are moved into the database at the start.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from earnest.disk import sync
from earnest.serve.store import ServerStore
from earnest.serve.tinker.errors import NotThere, WireError
from earnest.serve.tinker.names import CheckpointPath, folder_of, is_run, new_id

TTL = (3600, 10 * 366 * 24 * 3600)
_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_RUN = "INSERT OR IGNORE INTO tinker_runs VALUES(?, ?, ?, ?, ?)"
_CHECKPOINT = "INSERT OR REPLACE INTO tinker_checkpoints VALUES(?, ?, ?, ?, ?, ?, ?, ?)"


def now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass(frozen=True)
class TrainingRun:
    """What the database has about a run; ``lora`` are the fields of its LoRA on the wire."""

    id: str
    base_model: str
    lora: Mapping[str, Any]
    metadata: Mapping[str, str]
    last_request: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is listed: its files, their size in bytes, and when it expires (None: never)."""

    path: CheckpointPath
    folder: Path
    time: str
    size: int
    metadata: Mapping[str, str]
    expires: str | None


class CheckpointStore:
    def __init__(self, store: ServerStore) -> None:
        self.db, self.root = store.db, store.folder / "tinker"
        # Requests since the last checkpoint: written with the next one, since no request waits for a commit.
        self._last_request: dict[str, str] = {}
        self._import_records()
        for run in self.runs():
            self._sweep(run)

    def add(self, run: str, base_model: str, lora: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        self.db.run(_RUN, (run, base_model, json.dumps(lora), json.dumps(metadata), now()))

    def get(self, run: str) -> TrainingRun:
        row = self.db.one("SELECT * FROM tinker_runs WHERE id = ?", (run,))
        if row is None:
            raise NotThere(f"there is no training run {run!r}.")
        last = self._last_request.get(run, row["last_request"])
        return TrainingRun(run, row["base_model"], json.loads(row["lora"]), json.loads(row["metadata"]), last)

    def touch(self, run: str) -> None:
        self._last_request[run] = now()

    def runs(self) -> list[str]:
        """All runs, the one with the latest request first."""
        last = {r["id"]: r["last_request"] for r in self.db.read("SELECT id, last_request FROM tinker_runs")}
        return sorted(last, key=lambda run: self._last_request.get(run, last[run]), reverse=True)

    def save(
        self,
        path: CheckpointPath,
        write: Callable[[Path], object],
        *,
        overwrite: bool = False,
        ttl: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a checkpoint with ``write(folder)`` and list it; when this returns, both are on the disk."""
        self.get(path.run)
        expires = _expiry(ttl)
        folder = self._place(path.run, path.kind) / f"{path.name}@{new_id()[:12]}"

        def check(old: str | None) -> None:
            if old is not None and not overwrite:
                raise WireError(f"{path} exists already; choose another name, or overwrite it.", 409)

        def work(c: sqlite3.Connection) -> str | None:
            old = _listed(c, path)
            check(old)
            c.execute(_CHECKPOINT, values)
            c.execute("UPDATE tinker_runs SET last_request = ? WHERE id = ?", (now(), path.run))
            return old

        row = self._row(path)
        check(None if row is None else row["folder"])  # before the files are written, and again with the commit
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(folder)
            for part in [*folder.rglob("*"), folder, *list(folder.parents)[:4]]:  # up to the data folder
                sync(part)
            size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            key = (path.run, path.kind, path.name)
            values = (*key, folder.name, now(), size, json.dumps(dict(metadata or {})), expires)
            old = self.db.write(work)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if old is not None:
            shutil.rmtree(folder.with_name(old), ignore_errors=True)

    def find(self, path: CheckpointPath) -> Checkpoint:
        """A listed checkpoint; one that has expired is deleted instead."""
        self.get(path.run)
        row = self._row(path)
        if row is not None and row["expires"] and datetime.fromisoformat(row["expires"]) < datetime.now(UTC):
            self.delete(path)
            row = None
        if row is None:
            raise NotThere(f"there is no checkpoint {path}.")
        folder = self._place(path.run, path.kind) / row["folder"]
        return Checkpoint(path, folder, row["time"], row["size"], json.loads(row["metadata"]), row["expires"])

    def delete(self, path: CheckpointPath) -> None:
        self.get(path.run)

        def work(c: sqlite3.Connection) -> str:
            if (folder := _listed(c, path)) is None:
                raise NotThere(f"there is no checkpoint {path}.")
            c.execute(f"DELETE FROM tinker_checkpoints {_WHERE}", (path.run, path.kind, path.name))
            return folder

        shutil.rmtree(self._place(path.run, path.kind) / self.db.write(work), ignore_errors=True)

    def set_ttl(self, path: CheckpointPath, seconds: int | None) -> None:
        values = (_expiry(seconds), path.run, path.kind, path.name)
        self.find(path)
        self.db.run(f"UPDATE tinker_checkpoints SET expires = ? {_WHERE}", values)

    def checkpoints(self, run: str) -> list[dict[str, Any]]:
        """As the SDK reads them, oldest first."""
        self.get(run)
        found = []
        for row in self.db.read("SELECT kind, name FROM tinker_checkpoints WHERE run = ? ORDER BY time", (run,)):
            with suppress(NotThere):
                c = self.find(CheckpointPath(run, row["kind"], row["name"]))
                names = {"checkpoint_id": c.path.checkpoint_id, "checkpoint_type": _TYPES[row["kind"]]}
                facts = {"time": c.time, "tinker_path": str(c.path), "size_bytes": c.size, "public": False}
                found.append({**names, **facts, "user_metadata": c.metadata or None, "expires_at": c.expires})
        return found

    def describe(self, run: str) -> dict[str, Any]:
        """A training run as the SDK reads it."""
        found, saved = self.get(run), self.checkpoints(run)
        last = {c["checkpoint_type"]: c for c in saved}
        return {
            "training_run_id": run,
            "base_model": found.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": found.lora["rank"],
            "last_request_time": found.last_request,
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": found.metadata or None,
        }

    def _row(self, path: CheckpointPath) -> sqlite3.Row | None:
        return self.db.one(f"SELECT * FROM tinker_checkpoints {_WHERE}", (path.run, path.kind, path.name))

    def _place(self, run: str, kind: str) -> Path:
        return self.root / folder_of(run) / kind

    def _import_records(self) -> None:
        """Move the first edition's run.json files into the database; each is deleted after its rows are committed."""
        for file in sorted(self.root.glob("*/run.json")):
            try:
                record = json.loads(file.read_text())
                id, lora, metadata = record["id"], json.dumps(record["lora"]), json.dumps(record["metadata"])
                run = (id, record["base_model"], lora, metadata, record["last_request"])
                saved = []
                for checkpoint_id, entry in record["checkpoints"].items():
                    kind, name = checkpoint_id.split("/")
                    facts = (entry["time"], entry["size"], json.dumps(entry["metadata"]), entry["expires"])
                    saved.append((id, kind, name, entry.get("folder", name), *facts))
                known = is_run(id) and folder_of(id) == file.parent.name
            except (ValueError, KeyError, TypeError, AttributeError):
                known = False
            if not known:
                raise WireError(f"{file} is not a record of a training run; move its folder away to start.")

            def work(c: sqlite3.Connection, run: tuple[Any, ...] = run, saved: list[Any] = saved) -> None:
                if c.execute(_RUN, run).rowcount:  # 0: the process died before it deleted the file
                    c.executemany(_CHECKPOINT, saved)

            self.db.write(work)
            file.unlink()

    def _sweep(self, run: str) -> None:
        """Delete what a dead process left: a checkpoint that was not listed in time, or one that was overwritten."""
        rows = self.db.read("SELECT kind, name, folder FROM tinker_checkpoints WHERE run = ?", (run,))
        listed = {(r["kind"], r["name"]): r["folder"] for r in rows}
        for kind in _TYPES:
            for folder in self._place(run, kind).glob("*"):
                name = folder.name.partition("@")[0]
                ours = folder.name.startswith(".") or "@" in folder.name or (kind, name) in listed
                if ours and listed.get((kind, name)) != folder.name:
                    shutil.rmtree(folder, ignore_errors=True)


_WHERE = "WHERE run = ? AND kind = ? AND name = ?"


def _listed(c: sqlite3.Connection, path: CheckpointPath) -> str | None:
    """The folder of a checkpoint inside a transaction; None where there is none."""
    query = f"SELECT folder FROM tinker_checkpoints {_WHERE}"
    row = c.execute(query, (path.run, path.kind, path.name)).fetchone()
    return None if row is None else str(row["folder"])


def _expiry(ttl: int | None) -> str | None:
    if ttl is None:
        return None
    if not TTL[0] <= ttl <= TTL[1]:
        raise WireError(f"ttl_seconds is {ttl}; give {TTL[0]} (an hour) … {TTL[1]} (ten years), or none.")
    return (datetime.now(UTC) + timedelta(seconds=ttl)).isoformat()

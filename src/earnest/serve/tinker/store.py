"""Training runs and their checkpoints on disk: what survives a restart.

    <data>/tinker/<run>/run.json              the run, and the list of its checkpoints
    <data>/tinker/<run>/weights/<name>/       a state: adapter and optimizer, as LocalEngine writes it
    <data>/tinker/<run>/sampler_weights/<name>/   an adapter in PEFT's format and our exact one

A checkpoint exists when run.json lists it; that file is replaced whole, after the folder is complete and synced. One
that overwrites another has a folder of its own (``<name>@<id>``), and the old one goes when run.json names the new one:
a process that dies at any moment leaves one of the two. What it left besides is swept at the next start.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path as Folder
from typing import Any

from earnest.disk import sync
from earnest.serve.tinker.errors import NotThere, WireError
from earnest.serve.tinker.names import Path, folder_of, is_run, new_id

TTL = (3600, 10 * 366 * 24 * 3600)
_TYPES = {"weights": "training", "sampler_weights": "sampler"}


def now() -> datetime:
    return datetime.now(UTC)


class Store:
    """All runs under one folder."""

    def __init__(self, data: Folder) -> None:
        self.root = data / "tinker"
        self._lock = threading.RLock()
        self._runs: dict[str, dict[str, Any]] = {}
        for file in sorted(self.root.glob("*/run.json")):
            try:
                run = json.loads(file.read_text())
                known = is_run(run["id"])
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise WireError(f"{file} is no record of a training run; move its folder away to start.")
            self._runs[run["id"]] = run
            self._sweep(run)

    # --- runs ------------------------------------------------------------------------------------------------------

    def add(self, run: str, facts: Mapping[str, Any]) -> None:
        with self._lock:
            self._runs[run] = {"id": run, "last_request": now().isoformat(), "checkpoints": {}, **facts}
            self._write(run)

    def get(self, run: str) -> dict[str, Any]:
        if run not in self._runs:
            raise NotThere(f"there is no training run {run!r}.")
        return self._runs[run]

    def touch(self, run: str) -> None:
        self._runs[run]["last_request"] = now().isoformat()

    def runs(self) -> list[str]:
        return sorted(self._runs, key=lambda r: str(self._runs[r]["last_request"]), reverse=True)

    def _write(self, run: str) -> None:
        folder = self.root / folder_of(run)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "run.json.part"
        part.write_text(json.dumps(self._runs[run], indent=1, sort_keys=True))
        sync(part)
        os.replace(part, folder / "run.json")
        sync(folder)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        write: Callable[[Folder], object],
        *,
        overwrite: bool = False,
        ttl: int | None = None,
        metadata: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint with ``write(folder)`` and list it. One run's requests come one after the other."""
        with self._lock:
            listed = self.get(path.run)["checkpoints"]
            if path.checkpoint_id in listed and not overwrite:
                raise WireError(f"{path} exists already; choose another name, or overwrite it.", 409)
            expires = self._expiry(ttl)
            place = self.root / folder_of(path.run) / path.kind / path.name
        fresh = place.with_name(f".{path.name}.{new_id()}")
        fresh.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(fresh)  # outside the lock: it waits for a turn, and readers must not wait for it
            for part in [*fresh.rglob("*"), fresh]:
                sync(part)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        with self._lock:
            before = listed.get(path.checkpoint_id)
            old = None if before is None else self._folder(path)
            folder = place if old is None else place.with_name(f"{path.name}@{new_id()[:12]}")
            if old is None:
                shutil.rmtree(folder, ignore_errors=True)  # nothing lists it: a process died before it did
            try:
                fresh.rename(folder)
                sync(folder.parent)
                listed[path.checkpoint_id] = {
                    "time": now().isoformat(),
                    "size": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
                    "metadata": dict(metadata or {}),
                    "expires": expires,
                    "folder": folder.name,
                    **(facts or {}),
                }
                self._write(path.run)
            except BaseException:
                listed.pop(path.checkpoint_id, None)
                if before is not None:
                    listed[path.checkpoint_id] = before
                shutil.rmtree(fresh, ignore_errors=True)  # the folder stays: run.json on disk may name it by now
                raise
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)

    def find(self, path: Path) -> tuple[Folder, dict[str, Any]]:
        """The folder of a checkpoint and what is listed about it; one that has expired is deleted instead."""
        with self._lock:
            entry = self.get(path.run)["checkpoints"].get(path.checkpoint_id)
            if entry is not None and entry["expires"] and datetime.fromisoformat(entry["expires"]) < now():
                self.delete(path)
                entry = None
            if entry is None:
                raise NotThere(f"there is no checkpoint {path}.")
            return self._folder(path), entry

    def delete(self, path: Path) -> None:
        with self._lock:
            listed = self.get(path.run)["checkpoints"]
            if path.checkpoint_id not in listed:
                raise NotThere(f"there is no checkpoint {path}.")
            folder = self._folder(path)
            del listed[path.checkpoint_id]
            self._write(path.run)
            shutil.rmtree(folder, ignore_errors=True)

    def set_ttl(self, path: Path, seconds: int | None) -> None:
        with self._lock:
            self.find(path)[1]["expires"] = self._expiry(seconds)
            self._write(path.run)

    def checkpoints(self, run: str) -> list[dict[str, Any]]:
        """As the SDK reads them, oldest first."""
        with self._lock:
            found = []
            for checkpoint_id in list(self.get(run)["checkpoints"]):
                path = Path.parse(f"tinker://{run}/{checkpoint_id}")
                try:
                    entry = self.find(path)[1]
                except NotThere:
                    continue
                found.append(
                    {
                        "checkpoint_id": checkpoint_id,
                        "checkpoint_type": _TYPES[path.kind],
                        "time": entry["time"],
                        "tinker_path": str(path),
                        "size_bytes": entry["size"],
                        "public": False,
                        "user_metadata": entry["metadata"] or None,
                        "expires_at": entry["expires"],
                    }
                )
            return sorted(found, key=lambda c: str(c["time"]))

    def describe(self, run: str) -> dict[str, Any]:
        """A training run as the SDK reads it."""
        facts, saved = self.get(run), self.checkpoints(run)
        last = {
            kind: next((c for c in reversed(saved) if c["checkpoint_type"] == kind), None) for kind in _TYPES.values()
        }
        return {
            "training_run_id": run,
            "base_model": facts["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": facts["lora"]["rank"],
            "last_request_time": facts["last_request"],
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": facts["metadata"] or None,
        }

    def _folder(self, path: Path) -> Folder:
        """Where a listed checkpoint is."""
        entry = self._runs[path.run]["checkpoints"][path.checkpoint_id]
        return self.root / folder_of(path.run) / path.kind / str(entry.get("folder", path.name))

    def _sweep(self, run: Mapping[str, Any]) -> None:
        """Take away what a dead process left: half a checkpoint, or the side of an overwrite that is not listed."""
        listed = run["checkpoints"]
        for kind in _TYPES:
            for folder in (self.root / folder_of(run["id"]) / kind).glob("*"):
                name = folder.name.partition("@")[0]
                used = listed.get(f"{kind}/{name}", {}).get("folder", name) == folder.name
                ours = "@" in folder.name or f"{kind}/{name}" in listed  # no checkpoint's name has an @
                if folder.name.startswith(".") or (ours and not used):
                    shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _expiry(ttl: int | None) -> str | None:
        if ttl is None:
            return None
        if not TTL[0] <= ttl <= TTL[1]:
            raise WireError(f"ttl_seconds is {ttl}; give {TTL[0]} (an hour) … {TTL[1]} (ten years), or none.")
        return (now() + timedelta(seconds=ttl)).isoformat()

"""The run folder: what each file is and how it is written. docs/run-folder.md describes it for readers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from earnest import disk
from earnest.config import LoopConfig, dump
from earnest.disk import JsonLines, write_json, write_text
from earnest.errors import CheckpointError
from earnest.models.protocol import PolicyLike
from earnest.report.record import FORMAT, EvalRecord, EventRecord, Level, RunRecord, SampleRecord, StepRecord, written
from earnest.runs import environment

ROLLOUTS = "rollouts.jsonl"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def default_place(recipe: str) -> Path:
    """runs/<recipe>-<time>; with a number at the end if that folder exists."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    place = Path("runs") / f"{recipe}-{stamp}"
    number = 2
    while place.exists():
        place = place.with_name(f"{recipe}-{stamp}-{number}")
        number += 1
    return place


def require_free(place: Path) -> None:
    """Raise if ``place`` is a folder with files in it, or if no folder can be made there."""
    for part in (place, *place.parents):
        if part.exists() and not part.is_dir():
            what = "is a file" if part == place else f"cannot be made, because {part} is a file"
            raise CheckpointError(f"out={place} {what}; choose a new folder.")
    if place.is_dir() and any(place.iterdir()):
        if (place / "run.json").exists():
            raise CheckpointError(
                f"{place} holds a run; continue it with `earnest run {place} --resume`, or choose another out=DIR."
            )
        raise CheckpointError(f"out={place} is not empty; choose another folder, or empty it.")


class RunFolder:
    """The folder of one run. A lock lets one process at a time use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lock = disk.lock(path / ".lock")
        if lock is None:
            raise CheckpointError(f"{path} is in use by another process; wait for it, or choose another out=DIR.")
        self._lock = lock
        kinds: dict[str, Any] = {"step": StepRecord, "eval": EvalRecord}
        self.metrics = JsonLines(path / "metrics.jsonl", lambda line: written(kinds[line["kind"]], line))
        self.samples = JsonLines(path / "samples.jsonl", lambda line: written(SampleRecord, line))
        self.rollouts: JsonLines | None = None
        if (path / ROLLOUTS).exists():
            self.record_rollouts()
        self.header: dict[str, Any] = {}

    @classmethod
    def create(cls, path: Path, config: LoopConfig, policy: PolicyLike, header: Mapping[str, Any]) -> RunFolder:
        """Make a new folder with the config and the environment of the policy. ``run.json`` is written last, so a
        folder with a run.json has all the other files."""
        require_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path)
        except OSError as error:
            raise CheckpointError(f"out={path} cannot be made ({error.strerror}); choose another out=DIR.") from None
        write_text(path / "config.yaml", dump(config))
        write_json(path / "environment.json", environment.describe(policy))
        folder.header = {"format": FORMAT, **header, "status": "running", "reason": None, "started": now()}
        folder.update(steps_done=0, seconds=0.0)
        folder.event("info", "started")
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run's folder."""
        if not path.is_dir():
            raise CheckpointError(f"there is no run folder {path}; give the folder that `earnest run` printed.")
        if not (path / "run.json").is_file():
            raise CheckpointError(
                f"{path} is not a run folder (no run.json); start a run with `earnest run RECIPE out={path}`."
            )
        header = read_json(path / "run.json")
        if header.get("format") != FORMAT:
            raise CheckpointError(
                f"{path}/run.json has the format {header.get('format')!r}; this earnest reads {FORMAT!r}."
            )
        folder = cls(path)
        folder.header = header
        return folder

    def update(self, **changes: Any) -> None:
        """Change run.json."""
        self.header |= changes
        self.header["updated"] = now()
        write_json(self.path / "run.json", written(RunRecord, self.header))

    def event(self, level: Level, text: str) -> None:
        """Write a line of events.log."""
        event = EventRecord(time=now(), level=level, text=" ".join(text.split()))
        with (self.path / "events.log").open("a", encoding="utf-8") as file:
            file.write(f"{event}\n")

    def record_rollouts(self) -> JsonLines:
        """The file with all that an asynchronous run trained on; other runs have none."""
        if self.rollouts is None:
            self.rollouts = JsonLines(self.path / ROLLOUTS)
        return self.rollouts

    def _lines(self) -> list[JsonLines]:
        return [self.metrics, self.samples, *([] if self.rollouts is None else [self.rollouts])]

    def lengths(self) -> dict[str, int]:
        """The lengths of the JSONL files in bytes; a checkpoint stores them."""
        return {lines.path.name: lines.length() for lines in self._lines()}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Cut the JSONL files to the lengths that a checkpoint stored, so that a resumed run repeats no line."""
        for lines in self._lines():
            lines.cut(lengths.get(lines.path.name, 0))

    def close(self) -> None:
        for lines in self._lines():
            lines.close()
        self._lock.release()


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} does not hold a mapping.")
    return found

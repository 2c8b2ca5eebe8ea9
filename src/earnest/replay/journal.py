"""Requests with their answers, one line each, as they arrive: a stopped replay continues here and repeats none."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from earnest.disk import JsonLines
from earnest.replay.endpoint import Usage
from earnest.replay.errors import ReplayError

Kind = Literal["answer", "verdict"]


class Journal:
    """A JSONL file: the settings that the answers belong to, then one answer per line. An incomplete last line is cut
    off."""

    def __init__(self, path: Path, asking: Mapping[str, Any], traces: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        header = {"asking": asking, "traces": traces}
        path.parent.mkdir(parents=True, exist_ok=True)
        good = self._read(header)
        self._lines = JsonLines(path)
        self._lines.cut(good)
        if good == 0:
            self._lines.append(header)

    def _read(self, header: Mapping[str, Any]) -> int:
        """Read the existing answers; returns the length of the complete lines."""
        if not self.path.exists():
            return 0
        good = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError:
                raise ReplayError(
                    f"{self.path}, line {number + 1} is not JSON; delete the file to start again."
                ) from None
            if number == 0 and record != json.loads(json.dumps(header)):
                changed = [key for key in header if record.get(key) != json.loads(json.dumps(header[key]))]
                raise ReplayError(
                    f"{self.path} belongs to other {' and '.join(changed)}; use those settings to continue, give "
                    "another out=, or delete it to start again."
                )
            if number:
                self._found[record["kind"], record["key"]] = record
            good += len(line)
        return good

    def get(self, kind: Kind, key: str) -> dict[str, Any] | None:
        return self._found.get((kind, key))

    def add(self, kind: Kind, key: str, usage: Usage | None = None, **facts: Any) -> dict[str, Any]:
        """Keep an answer or a verdict; from any thread."""
        record = {"kind": kind, "key": key, **facts, "usage": None if usage is None else asdict(usage)}
        with self._lock:
            if (kind, key) not in self._found:
                self._found[kind, key] = record
                self._lines.append(record)
        return self._found[kind, key]

    def records(self, kind: Kind) -> list[dict[str, Any]]:
        return [record for (k, _), record in self._found.items() if k == kind]

    def close(self) -> None:
        self._lines.close()

"""Files that survive a crash: written whole or not at all, or line by line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """fsync a file or a folder, so that the rename that follows never reaches the disk before its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a temporary file, sync, rename: a reader sees the old file or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(clean(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def clean(data: Any) -> Any:
    """The same data as JSON can hold it: a number that is not finite is null."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {str(k): clean(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [clean(v) for v in data]
    return data


class Lines:
    """A JSONL file that is appended to line by line; a checkpoint stores its length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab")

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(clean(record), ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def read(self) -> list[dict[str, Any]]:
        """Every record so far."""
        self._file.flush()
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def length(self) -> int:
        """Bytes that are safely on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def cut(self, length: int) -> None:
        """Remove everything after ``length`` bytes."""
        self._file.flush()
        os.truncate(self.path, length)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

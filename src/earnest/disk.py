"""Files that survive a crash: written whole or not at all, or line by line."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from torch import Tensor

WINDOWS = os.name == "nt"


def lock(path: Path) -> BaseFileLock | None:
    """Lock the file at ``path`` until ``release()`` or the end of this process; None if another one holds it."""
    from filelock import FileLock, Timeout

    made = FileLock(path, mode=0o600, blocking=False, thread_local=False)  # a server is closed by another thread
    try:
        made.acquire()
    except Timeout:
        return None
    return made


def sync(path: Path) -> None:
    """fsync a file or a folder, so that its content is on disk before the rename that follows.

    Windows syncs no folder, and syncs a file only through a handle that may write.
    """
    if WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in one rename, with the mode that the umask gives; a full disk is an ``OSError``."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    part.touch()
    mode = part.stat().st_mode  # safetensors replaces the file by one that only its owner can read
    try:
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, part, dict(metadata) if metadata is not None else None)
        part.chmod(mode & 0o777)
        part.replace(path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a temporary file, sync it, rename it: a reader finds the old file or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
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


class JsonLines:
    """A JSONL file that is appended to line by line; a checkpoint stores its length. ``check`` converts a record into
    the line's data, and raises if it must not be written."""

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict) -> None:
        self.path = path
        self._check = check
        self._file = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(clean(self._check(record)), ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def read(self) -> list[dict[str, Any]]:
        """Every record so far."""
        self._file.flush()
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def length(self) -> int:
        """The length of the file in bytes, after a sync."""
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

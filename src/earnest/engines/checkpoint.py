"""Atomic checkpoints: tensors as safetensors, the rest as JSON, a manifest of hashes, one rename.

A folder is written under a temporary name, synced, and renamed, so a reader finds the old one, the new one, or none.
``read`` checks every file against the manifest; a damaged or edited checkpoint raises an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from earnest.disk import sync, write_tensors
from earnest.errors import CheckpointError

TENSORS, META, MANIFEST = "tensors.safetensors", "meta.json", "manifest.json"


def write(folder: Path | str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint at ``folder``. One that is already there is replaced when the new one is complete."""
    folder = Path(folder)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_tensors(fresh / TENSORS, tensors)
    (fresh / META).write_text(json.dumps(meta, indent=1, sort_keys=True))
    hashes = {name: file_hash(fresh / name) for name in (TENSORS, META)}
    (fresh / MANIFEST).write_text(json.dumps(hashes, indent=1, sort_keys=True))
    for name in (TENSORS, META, MANIFEST):
        sync(fresh / name)
    sync(fresh)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old)
    else:
        fresh.rename(folder)
    sync(folder.parent)
    return folder


def read(folder: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the rest of a checkpoint, after a check of every file's hash."""
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing; use an earlier one.")
    try:
        hashes = json.loads((folder / MANIFEST).read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder / MANIFEST} is torn ({error}); use an earlier checkpoint.") from error
    for name in (TENSORS, META):
        path = folder / name
        if not path.is_file() or file_hash(path) != hashes.get(name):
            raise CheckpointError(
                f"{path} is not the file that was written (missing or changed); use an earlier checkpoint."
            )
    return load_file(folder / TENSORS), json.loads((folder / META).read_text())


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

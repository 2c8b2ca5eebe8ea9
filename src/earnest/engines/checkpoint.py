"""Atomic checkpoints: tensors as safetensors, the rest as JSON, a manifest of hashes, one rename.

    tensors.safetensors      what is whole on every rank: adapters, their optimizer, counters
    shard-*.safetensors      one file per rank with its shards (torch.distributed.checkpoint), if something is sharded
    meta.json                the rest
    manifest.json            the hash of every file

A folder is written under a temporary name, synced, and renamed, so a reader finds the old one, the new one, or none.
``read`` checks every file against the manifest; a damaged or edited checkpoint raises an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earnest.adapters.linalg import is_sharded
from earnest.disk import sync, write_tensors
from earnest.engines.mesh import Mesh
from earnest.errors import CheckpointError

TENSORS, META, MANIFEST = "tensors.safetensors", "meta.json", "manifest.json"


def write(folder: Path | str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], mesh: Mesh | None = None) -> Path:
    """Write a checkpoint at ``folder``. One that is already there is replaced when the new one is complete.

    On a mesh every rank calls this with the same names. Rank 0 gives the folder and writes what is whole; each rank
    writes its shards.
    """
    mesh = mesh or Mesh()
    folder = Path(mesh.from_first(str(Path(folder).absolute()))) if mesh.size > 1 else Path(folder)
    fresh = Path(mesh.from_first(str(folder.with_name(f".{folder.name}.{os.getpid()}.tmp"))))
    shards = {name: t for name, t in tensors.items() if is_sharded(t)}
    if mesh.rank == 0:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        write_tensors(fresh / TENSORS, {name: t for name, t in tensors.items() if name not in shards})
        (fresh / META).write_text(json.dumps(meta, indent=1, sort_keys=True))
    mesh.gathered(0)
    if shards:
        _write_shards(fresh, shards)
    if mesh.rank == 0:
        files = sorted(path.name for path in fresh.iterdir())
        hashes = {name: file_hash(fresh / name) for name in files}
        (fresh / MANIFEST).write_text(json.dumps(hashes, indent=1, sort_keys=True))
        for name in (*files, MANIFEST):
            sync(fresh / name)
        sync(fresh)
        _put_in_place(fresh, folder)
    mesh.gathered(0)
    return folder


def _put_in_place(fresh: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old)
    else:
        fresh.rename(folder)
    sync(folder.parent)


def _write_shards(folder: Path, shards: Mapping[str, Tensor]) -> None:
    """Each rank's shards in a file of its own, by torch's distributed checkpointing in safetensors."""
    from torch.distributed import checkpoint as distributed
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    distributed.save(dict(shards), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def verify(folder: Path | str) -> dict[str, Any]:
    """The part of a checkpoint that is no tensor, after a check of every file's hash."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing; use an earlier one.")
    try:
        hashes = json.loads((folder / MANIFEST).read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{folder / MANIFEST} is torn ({error}); use an earlier checkpoint.") from error
    for name in {TENSORS, META, *hashes}:
        path = folder / name
        if not path.is_file() or file_hash(path) != hashes.get(name):
            raise CheckpointError(
                f"{path} is not the file that was written (missing or changed); use an earlier checkpoint."
            )
    return json.loads((folder / META).read_text())


def read(
    folder: Path | str, shard: Callable[[str, torch.Size], Tensor | None] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the rest of a checkpoint, after a check of every file's hash.

    ``shard(name, size)`` gives a rank's part to read into, or None for a tensor that is whole here. How many ranks
    wrote the checkpoint makes no difference.
    """
    from safetensors.torch import load_file

    folder, meta = Path(folder), verify(folder)
    if shard is None and [path.name for path in folder.glob("*.safetensors")] == [TENSORS]:
        return load_file(folder / TENSORS), meta
    from torch.distributed import checkpoint as distributed
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Any] = {}
    for name, known in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(known, TensorStorageMetadata)
        part = None if shard is None else shard(name, known.size)
        tensors[name] = torch.empty(known.size, dtype=known.properties.dtype) if part is None else part
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it reads without an exchange between ranks
        distributed.load(tensors, storage_reader=reader, no_dist=True)
    return tensors, meta


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

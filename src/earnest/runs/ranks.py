"""A run of several ranks (``torchrun``): every rank runs the whole loop, and rank 0's folder is the run folder.

The other ranks write into a scratch folder of their own, which is removed at the end; what they print goes to
``ranks/rank-N.log`` in the run folder. So the loop has no case for ranks, and every file is written once.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from earnest.config import RunConfig
from earnest.engines.mesh import PATIENCE, Mesh
from earnest.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raise if a setting is not supported with several ranks."""
    engine, guard, sampler = config.engine, config.guard, config.sampler
    processes = sampler is not None and sampler.port is None and not str(sampler.url).startswith("http")
    parts, copies = config.replicated and engine.shard > 1, "replicas that share differences of whole tensors"
    for key, used, what, way in (
        ("engine.kind", engine.kind != "local", "several ranks", "shard"),
        ("sampler.staleness", sampler is not None and sampler.staleness > 0, "several ranks", "shard"),
        ("sampler.url", processes, "several ranks unless it is a server's", "shard"),
        ("sampler", engine.tensor > 1 and sampler is not None, "split layers", "tensor"),
        ("sampling.workers", config.sampling.workers > 0, "several ranks", "shard"),
        ("adapter.kind", parts and config.adapter.kind == "full", copies, "shard"),
        ("adapter.modules_to_save", parts and bool(config.adapter.modules_to_save), copies, "shard"),
        ("guard.refresh", engine.tensor > 1 and guard is not None and guard.refresh > 0, "split layers", "tensor"),
    ):
        if engine.ranks > 1 and used:
            raise ConfigError(f"{key}: is not supported with {what}; set engine.{way}=1, or leave it out.")


def join(config: RunConfig) -> Mesh:
    """The mesh of this run, or of this replica. Settings that it does not support are refused."""
    check(config)
    engine = config.engine
    patience = PATIENCE + timedelta(seconds=config.sync.timeout if config.replicated else 0)
    return Mesh.start(engine.shard, engine.replicate, engine.tensor, patience)


def _rank() -> int:
    """The number that ``torchrun`` gave this process; 0 without other processes."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def own_copy(folder: Path) -> Path:
    """The folder to resume in: rank 0's is the run folder, another rank's is a copy without its checkpoints, which
    rank 0 chooses. Called before the ranks meet."""
    if _rank() == 0:
        return folder
    copy = Path(tempfile.mkdtemp(prefix="earnest-rank-")) / "run"
    return Path(shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".lock", "ranks", "checkpoints", ".*.tmp")))


def own_place(mesh: Mesh, place: Path) -> Path:
    """The folder that this rank writes: the run folder, or a scratch folder."""
    return place if mesh.rank == 0 else Path(tempfile.mkdtemp(prefix="earnest-rank-")) / "run"


def settle(mesh: Mesh, place: Path, own: Path) -> None:
    """Rank 0 has made the run folder ``place``: the other ranks' output goes there from now on."""
    if mesh.size == 1:
        return
    logs = Path(mesh.from_first(str(place.resolve()))) / "ranks"
    logs.mkdir(exist_ok=True)
    for note in logs.glob(f"rank-{mesh.rank}.failed"):
        note.unlink()
    mesh.gathered(0)
    mesh.notes = logs
    if mesh.rank:
        mesh.scratch = own
        sys.stdout.flush()
        log = os.open(logs / f"rank-{mesh.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)


def leave(mesh: Mesh) -> None:
    """At the end of a run: the scratch folder goes."""
    if mesh.scratch is not None:
        shutil.rmtree(mesh.scratch.parent, ignore_errors=True)


def console_of(console: Console | None) -> Console:
    """Where this rank prints before its log exists: rank 0 on the terminal, the others nowhere."""
    return Console(quiet=True) if _rank() else console or Console()

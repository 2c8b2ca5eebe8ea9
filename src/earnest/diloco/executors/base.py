"""Executors start replicas: N × ``earnest worker RUN_URL --replica i``.

Replicas synchronize through the bucket only, so an executor needs no addresses, no ranks and no rendezvous. It starts
a command and reports which of its commands ended and how; ``supervise`` starts replicas again, the same way for every
executor.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlparse

from earnest.errors import EarnestError, nearest

STORE_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "OBJECT_STORE_")
"""Prefixes of the environment variables by which a store's address and keys reach a worker."""
HUB_VARIABLES = ("HF_TOKEN", "HF_ENDPOINT")
"""What a worker needs to load a gated or private model."""
INSTALL = "EARNEST_INSTALL"
LOST = -9
"""The exit code of a replica whose actor or container is gone."""
WAIT = 60.0
"""Seconds that an actor gets to answer."""


class ExecutorError(EarnestError):
    """Replicas cannot be started, or they ended more often than restarts are allowed."""


@dataclass(frozen=True)
class Job:
    """What to start. ``env`` is what a worker needs besides its machine's own environment: the store's keys."""

    url: str
    replicas: int
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    """Where workers on this machine keep their checkpoints and logs; elsewhere each chooses its own."""
    max_restarts: int = 3
    """How often each replica is started again."""
    samplers: int = 0
    """Ray actors that each replica samples with: a Ray that is started for the run has room for them, too."""
    gpu: bool | None = False
    """Whether each rank of a replica gets a GPU of its own. None: it does where there are GPUs."""
    ranks: int = 1
    """The processes of a replica, which it starts itself."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Settings that name files of this machine: recipe key → path."""

    def words(self, replica: int) -> list[str]:
        """The words after the interpreter or ``earnest``: the command that every executor runs."""
        own = [] if self.folder is None else ["--folder", f"{self.folder}/replica-{replica}"]
        return ["worker", self.url, "--replica", str(replica), *own]

    def command(self, replica: int) -> list[str]:
        return ["earnest", *self.words(replica)]


@dataclass(frozen=True)
class Exit:
    """A replica's command ended. ``code`` 0: the run is over; below 0: minus the signal; ``detail``: its log's end."""

    replica: int
    attempt: int
    code: int
    detail: str = ""


def gpu_variables(gpu: bool | None, number: int, ranks: int = 1) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of the replica with this number on this machine: one of the visible GPUs for each of its
    ranks, in turn."""
    if gpu is False:
        return {}
    import torch

    if gpu is None and not torch.cuda.is_available():
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    own = [devices[i % len(devices)] for i in range(number * ranks, (number + 1) * ranks) if devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}


def elsewhere(job: Job, where: str) -> Job:
    """The job for other machines, where each worker chooses its own folder. Refuses what only this machine can reach: a
    store in a folder, loopback addresses, credential files, data."""
    if job.url.startswith(("file:", "memory:")):
        raise ExecutorError(
            f"--on {where}: the run is at {job.url}, which only this machine can reach; give a bucket with "
            "store=s3://… (or gs://…, az://…)."
        )
    for key, path in job.files.items():
        raise ExecutorError(
            f"--on {where}: {key}={path} is a file of this machine, which the workers cannot read; give a Hugging Face "
            "id, or use --on local."
        )
    for name, value in job.env.items():
        host = urlparse(value).hostname if "://" in value else None
        if host is not None and (host in ("localhost", "0.0.0.0", "::1") or host.startswith("127.")):
            raise ExecutorError(
                f"--on {where}: ${name}={value} is an address of this machine only; give one that the workers reach."
            )
        if value.startswith(("/", "~")) and Path(value).expanduser().exists():
            raise ExecutorError(
                f"--on {where}: ${name} is a path of this machine, which the workers cannot read; give the keys "
                "themselves in the environment."
            )
    return replace(job, folder=None)


def demand_gpu(job: Job, there: bool, where: str, example: str) -> None:
    """Refuse a run on CUDA on a machine without a GPU."""
    if job.gpu and not there:
        raise ExecutorError(f"--on {where}: device=cuda needs a machine with a GPU; write --on {example}.")


def requirements() -> list[str]:
    """What is installed there: ``$EARNEST_INSTALL``, the sources of earnest and of earnest-audit with a space between
    them (addresses of wheels, git+https://…).

    There is no default: a package of this name from PyPI would get the store's keys.
    """
    found = os.environ.get(INSTALL)
    if not found:
        raise ExecutorError(
            f"--on hf installs earnest on the job's machine, with the store's keys beside it; set ${INSTALL} to the "
            "sources of earnest and of earnest-audit that you trust (git+https://…, addresses of wheels), with a space "
            "between them."
        )
    return found.split()


class Executor(Protocol):
    """``start`` begins attempt number ``attempt`` of one replica and returns; ``poll`` gives what ended since the last
    call; ``stop`` ends everything that still runs. ``dry_run`` returns what would be submitted, as JSON-able data,
    and submits nothing."""

    name: ClassVar[str]

    def dry_run(self, job: Job) -> list[dict[str, Any]]: ...

    def start(self, job: Job, replica: int, attempt: int) -> None: ...

    def poll(self) -> list[Exit]: ...

    def stop(self) -> None: ...


class Polled:
    """An executor that looks at each replica it started: at the ``handle`` that ``start`` puts into ``running``."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[int, Any]] = {}  # replica → attempt, handle

    def look(self, handle: Any) -> tuple[int, str] | None:
        """(exit code, the end of its log) of a replica that has ended; frees what it held."""
        raise NotImplementedError  # abstract: every polled executor defines it

    def poll(self) -> list[Exit]:
        ended = []
        for replica, (attempt, handle) in list(self.running.items()):
            if (found := self.look(handle)) is not None:
                del self.running[replica]
                ended.append(Exit(replica, attempt, *found))
        return ended


EXECUTORS: dict[str, str] = {
    "local": "earnest.diloco.executors.local:LocalExecutor",
    "ray": "earnest.diloco.executors.ray:RayExecutor",
    "monarch": "earnest.diloco.executors.monarch:MonarchExecutor",
    "modal": "earnest.diloco.executors.modal:ModalExecutor",
    "hf": "earnest.diloco.executors.hf_jobs:HFJobsExecutor",
}
"""Name → "module:class"; the class takes the options of ``--on NAME[:OPTION]`` as one string."""


def get_executor(on: str) -> Executor:
    """The executor that ``--on NAME`` or ``--on NAME:OPTION`` (a cluster's address, a flavour of machine) names."""
    name, _, option = on.partition(":")
    if name not in EXECUTORS:
        raise ExecutorError(f"--on {on}: executor {name!r} is unknown: {nearest(name, EXECUTORS)}")
    module, _, cls = EXECUTORS[name].partition(":")
    return getattr(importlib.import_module(module), cls)(option)


def supervise(
    executor: Executor,
    job: Job,
    tick: Callable[[], None],
    say: Callable[[str], None],
    *,
    finished: Callable[[], bool],
    poll: float = 0.5,
) -> list[Exit]:
    """Start all replicas, start dead ones again, and return every exit once no replica runs.

    ``tick`` is called between looks; where ``finished`` returns True, no replica is started again.
    """
    attempts = dict.fromkeys(range(job.replicas), 1)
    exits: list[Exit] = []
    try:
        for replica in attempts:
            executor.start(job, replica, 1)
        running = set(attempts)
        while running:
            tick()
            for end in executor.poll():
                exits.append(end)
                running.discard(end.replica)
                if end.code == 0 or finished():
                    continue
                if attempts[end.replica] > job.max_restarts:
                    say(f"replica {end.replica} ended with {end.code} for the {end.attempt}th time; no more restarts")
                    continue
                attempts[end.replica] += 1
                say(f"replica {end.replica} ended with {end.code}; started again ({attempts[end.replica]})")
                executor.start(job, end.replica, attempts[end.replica])
                running.add(end.replica)
            if running:
                time.sleep(poll)
        tick()
    finally:
        executor.stop()
    if not finished():
        last = exits[-1] if exits else None
        words = f" The end of replica {last.replica}'s log: {last.detail}" if last and last.detail else ""
        raise ExecutorError(
            f"every replica ended before the run did ({len(exits)} exits, {job.max_restarts} restarts allowed each)."
            f"{words}\nWhat is committed is safe in {job.url}: resume the run, or start `earnest worker {job.url}`."
        )
    return exits

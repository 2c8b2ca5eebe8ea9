"""What every executor on remote machines needs: a store that they can reach, and sources to install earnest from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

from earnest.diloco.executors.base import ExecutorError, Job

INSTALL = "EARNEST_INSTALL"


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

"""What every executor on other people's machines needs: a store that they reach, and a way to get this earnest."""

from __future__ import annotations

import os
from dataclasses import replace

from earnest.diloco.executors.base import ExecutorError, Job

INSTALL = "EARNEST_INSTALL"


def demand_reachable(job: Job, where: str) -> None:
    """A folder of this machine is no meeting place for machines elsewhere."""
    if job.url.startswith(("file:", "memory:")):
        raise ExecutorError(
            f"--on {where}: the run lives at {job.url}, which only this machine can reach; give a bucket with "
            "store=s3://… (or gs://…, az://…)."
        )


def without_folder(job: Job) -> Job:
    """Elsewhere a worker chooses its own folder."""
    return replace(job, folder=None)


def requirement() -> str:
    """What is installed there: ``$EARNEST_INSTALL`` (a wheel's address, git+https://…), else this version."""
    from earnest.version import __version__

    return os.environ.get(INSTALL) or f"earnest[diloco]=={__version__}"

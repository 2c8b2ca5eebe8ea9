"""Replicas as Hugging Face Jobs: one job, one ``earnest worker`` each.

    --on hf                cpu-basic
    --on hf:a10g-small     another flavour of machine (`hf jobs hardware` lists them)

A job installs earnest with ``uvx`` from ``$EARNEST_INSTALL``. The store's keys are passed as secrets. The Hub limits
the number of requests: the namespace is fetched once, and the jobs' state every ``EVERY`` seconds, less often after a
failure.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, ClassVar

from earnest.diloco.executors.base import ExecutorError, Exit, Job, demand_gpu, elsewhere, requirements

_log = logging.getLogger(__name__)
IMAGE = "ghcr.io/astral-sh/uv:python3.11-bookworm"
HOURS = "24h"
"""A job's limit: the service's own default is 30 minutes."""
TOKEN = (
    "Hugging Face Jobs need a token with the right to start jobs: make one at huggingface.co/settings/tokens, then run "
    "`hf auth login`, or set HF_TOKEN."
)
EVERY, SLOWEST = 15.0, 240.0
"""Seconds between two looks at the jobs, and at most after failures."""
PATIENCE = 60
"""This many looks in a row may fail."""
CANCELS = 3
"""Tries to cancel a job."""
CODES = {"COMPLETED": 0, "ERROR": 1, "CANCELED": -15, "DELETED": -9}


class HFJobsExecutor:
    """``option`` is a flavour of machine; empty: cpu-basic."""

    name: ClassVar[str] = "hf"

    def __init__(self, option: str = "") -> None:
        self.flavor = option or "cpu-basic"
        self._jobs: dict[int, tuple[int, str]] = {}
        self._misses = 0
        self._namespace = ""
        self._next = 0.0
        self.every = EVERY

    def arguments(self, job: Job, replica: int, attempt: int) -> dict[str, Any]:
        """The keyword arguments of ``run_job``."""
        job = elsewhere(job, "hf")
        demand_gpu(job, not self.flavor.startswith("cpu"), f"hf:{self.flavor}", "hf:a10g-small")
        source, *others = requirements()
        run = re.sub(r"[^a-zA-Z0-9-]+", "-", job.url.rstrip("/").rsplit("/", 1)[-1])
        return {
            "image": IMAGE,
            "command": ["uvx", "--from", source, *[f"--with={other}" for other in others], *job.command(replica)],
            "secrets": dict(job.env),
            "flavor": self.flavor,
            "timeout": HOURS,
            "attempts": 1,  # ``supervise`` starts replicas again, the same way everywhere
            "name": f"earnest-{run}-replica-{replica}-{attempt}",
            "labels": {"earnest": run, "replica": str(replica)},
        }

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        return [self.arguments(job, i, 1) | {"secrets": sorted(job.env)} for i in range(job.replicas)]

    def start(self, job: Job, replica: int, attempt: int) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError

        wanted = self.arguments(job, replica, attempt)
        if not get_token():
            raise ExecutorError(f"--on hf: {TOKEN}")
        try:
            self._namespace = self._namespace or str(HfApi().whoami()["name"])
            self._jobs[replica] = (attempt, HfApi().run_job(**wanted, namespace=self._namespace).id)
        except HfHubHTTPError as error:
            way_out = f" {TOKEN}" if getattr(error.response, "status_code", None) in (401, 403) else ""
            raise ExecutorError(f"--on hf: replica {replica} was not started: {error}.{way_out}") from None

    def poll(self) -> list[Exit]:
        from huggingface_hub import HfApi

        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + self.every
        api = HfApi()
        ended: list[Exit] = []
        for replica, (attempt, name) in list(self._jobs.items()):
            try:
                status = api.inspect_job(job_id=name, namespace=self._namespace).status
                words = status.message or (self._tail(api, name) if status.stage in CODES else "")
            except Exception as error:  # a network error; the job itself goes on
                self._misses += 1
                if self._misses > PATIENCE:
                    raise ExecutorError(
                        f"--on hf: {PATIENCE} looks at the jobs in a row failed, the last: {error}"
                    ) from None
                self._next = time.monotonic() + min(SLOWEST, self.every * 2**self._misses)
                return ended
            self._misses = 0
            if status.stage in CODES:
                del self._jobs[replica]
                ended.append(Exit(replica, attempt, CODES[status.stage], words))
        return ended

    def _tail(self, api: Any, name: str) -> str:
        return " ".join(" ".join(api.fetch_job_logs(job_id=name, namespace=self._namespace, tail=5)).split())[-400:]

    def stop(self) -> None:
        """Cancel every job, even if some calls fail; raises with the jobs that may still run and cost."""
        left = [name for _, name in self._jobs.values() if not self._cancelled(name)]
        self._jobs.clear()
        if left:
            raise ExecutorError(
                f"--on hf: {len(left)} jobs could not be cancelled and may still run: {', '.join(left)}. Cancel each "
                f"with `hf jobs cancel {self._namespace}/ID`."
            )

    def _cancelled(self, name: str) -> bool:
        from huggingface_hub import HfApi

        for attempt in range(CANCELS):
            time.sleep(min(attempt * self.every, 30.0))
            try:
                HfApi().cancel_job(job_id=name, namespace=self._namespace)
                return True
            except Exception as error:  # a rate limit or a network error; the other jobs are still cancelled
                _log.warning("job %s was not cancelled: %s", name, error)
        return False

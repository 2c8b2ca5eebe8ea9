"""Replicas as processes of this machine, each with a log of its own."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from earnest.diloco.executors.base import ExecutorError, Job, Polled, gpu_variables
from earnest.diloco.executors.runner import Runner


class LocalExecutor(Polled):
    """A ``Runner`` for each replica; ``option`` must be empty. The CPU threads are divided among the replicas."""

    name: ClassVar[str] = "local"

    def __init__(self, option: str = "") -> None:
        super().__init__()
        if option:
            raise ExecutorError(f"--on local takes no option, got {option!r}; write --on local.")
        self._logs: Path | None = None

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "earnest.cli"]
        return [{"command": [*command, *job.words(i)], "env": self._own(job, i)} for i in range(job.replicas)]

    def start(self, job: Job, replica: int, attempt: int) -> None:
        # The launcher handles Ctrl-C and sends the workers SIGTERM.
        runner = Runner(self._folder(job) / f"replica-{replica}.log", own_session=True)
        runner.start(job.words(replica), self._own(job, replica))
        self.running[replica] = (attempt, runner)

    def look(self, handle: Runner) -> tuple[int, str] | None:
        return handle.poll()

    def stop(self) -> None:
        for _, runner in self.running.values():
            runner.terminate()
        for _, runner in self.running.values():
            runner.stop()
        self.running.clear()

    def _own(self, job: Job, replica: int) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // (job.replicas * job.ranks))
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            **gpu_variables(job.gpu, replica, job.ranks),
            **job.env,
        }

    def _folder(self, job: Job) -> Path:
        if self._logs is None:
            self._logs = Path(job.folder) if job.folder else Path(tempfile.mkdtemp(prefix="earnest-workers-"))
            self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs

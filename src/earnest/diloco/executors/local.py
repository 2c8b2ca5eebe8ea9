"""Replicas as processes of this machine, each with a log of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from earnest.diloco.executors.base import ExecutorError, Exit, Job, gpu_variables
from earnest.diloco.executors.runner import PARENT, WORKER_SCRIPT

TAIL = 400


class LocalExecutor:
    """``subprocess`` on this machine; ``option`` must be empty. The CPU threads are divided among the replicas."""

    name: ClassVar[str] = "local"

    def __init__(self, option: str = "") -> None:
        if option:
            raise ExecutorError(f"--on local takes no option, got {option!r}; write --on local.")
        self._running: dict[int, tuple[int, subprocess.Popen[bytes], Path]] = {}
        self._logs: Path | None = None

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        return [{"command": self._command(job, i), "env": self._own(job, i)} for i in range(job.replicas)]

    def start(self, job: Job, replica: int, attempt: int) -> None:
        log = self._folder(job) / f"replica-{replica}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER_SCRIPT, *job.words(replica)],  # it dies with this launcher
                env={**os.environ, **self._own(job, replica), PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the launcher handles Ctrl-C and sends the workers SIGTERM
            )
        self._running[replica] = (attempt, process, log)

    def poll(self) -> list[Exit]:
        ended = []
        for replica, (attempt, process, log) in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[replica]
                ended.append(Exit(replica, attempt, code, _tail(log)))
        return ended

    def stop(self) -> None:
        """SIGTERM (a worker writes a checkpoint and ends), after some seconds SIGKILL."""
        for _, process, _ in self._running.values():
            process.terminate()
        for _, process, _ in self._running.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def processes(self) -> Mapping[int, int]:
        """Replica → process id of what runs now."""
        return {replica: process.pid for replica, (_, process, _) in self._running.items()}

    def _command(self, job: Job, replica: int) -> list[str]:
        return [sys.executable, "-m", "earnest.cli", *job.words(replica)]

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


def _tail(log: Path) -> str:
    """The end of a log, as one line."""
    return " ".join(log.read_bytes()[-TAIL:].decode(errors="replace").split())

"""An executor for tests: `earnest worker`'s own function in forked processes, which start quickly."""

from __future__ import annotations

import multiprocessing
from typing import Any, ClassVar

from earnest.diloco.executors.base import Exit, Job
from tests.diloco.processes import context, main


class ForkExecutor:
    """``kill``: {replica: (point, times)}: where the first life of a replica ends."""

    name: ClassVar[str] = "fork"
    kill: ClassVar[dict[int, tuple[str, int]]] = {}

    def __init__(self, option: str = "") -> None:
        self.ctx: Any = context()
        self.running: dict[int, tuple[int, Any]] = {}

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        return [{"command": job.command(i)} for i in range(job.replicas)]

    def start(self, job: Job, replica: int, attempt: int) -> None:
        plan = {"die": self.kill[replica]} if attempt == 1 and replica in self.kill else {}
        words = (job.url, replica, f"{job.folder}/replica-{replica}", dict(job.env), plan)
        process = self.ctx.Process(target=main, args=words, daemon=True)
        process.start()
        self.running[replica] = (attempt, process)

    def poll(self) -> list[Exit]:
        ended = []
        for replica, (attempt, process) in list(self.running.items()):
            if not process.is_alive():
                process.join()
                del self.running[replica]
                ended.append(Exit(replica, attempt, process.exitcode))
        return ended

    def stop(self) -> None:
        for _, process in self.running.values():
            process.kill()
            process.join()
        self.running.clear()
        assert multiprocessing.current_process().name == "MainProcess"

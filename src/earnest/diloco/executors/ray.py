"""Replicas as Ray actors: one actor, one ``earnest worker`` each, on whatever node has room.

--on ray              a Ray of this machine, started and ended with the run
--on ray:auto         the cluster that this machine belongs to
--on ray:ADDRESS      another one, such as ray://head:10001 or 10.0.0.1:6379
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from earnest.diloco.executors.base import LOST, WAIT, ExecutorError, Job, Polled, elsewhere
from earnest.diloco.executors.runner import Runner
from earnest.sync.cluster import ClusterError, connect, first_line

OPTIONS: dict[str, float] = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
"""Of an actor. No restarts by Ray: ``supervise`` starts replicas again, the same way everywhere."""


class RayRunner(Runner):
    """A runner whose worker starts its own samplers in the cluster that it runs in."""

    def start(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        import ray

        super().start(words, {**env, "RAY_ADDRESS": ray.get_runtime_context().gcs_address})


class RayExecutor(Polled):
    """``option`` is the address of a running cluster; empty: a Ray of this machine."""

    name: ClassVar[str] = "ray"

    def __init__(self, option: str = "") -> None:
        super().__init__()
        self.address = option or os.environ.get("RAY_ADDRESS", "")
        self._ray: Any = None
        self._own = False

    def _job(self, job: Job) -> Job:
        return elsewhere(job, f"ray:{self.address}") if self.address else job

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        import torch

        job = self._job(job)
        room = max(_actors(job) + 1, os.cpu_count() or 1)
        init = {"address": self.address} if self.address else {"address": "local", "num_cpus": room}
        actor = {**OPTIONS, **_gpus(job, None if self.address else torch.cuda.device_count())}
        return [
            {"ray.init": init, "actor": actor, "command": job.command(i), "env": dict(job.env)}
            for i in range(job.replicas)
        ]

    def start(self, job: Job, replica: int, attempt: int) -> None:
        job = self._job(job)
        if self._ray is None:
            try:
                self._ray, self._own = connect(self.address, _actors(job))
            except ClusterError as error:
                raise ExecutorError(f"--on ray: {error} --on local needs no cluster.") from None
        gpus = _gpus(job, self._ray.cluster_resources().get("GPU", 0.0))
        actor = self._ray.remote(RayRunner).options(**OPTIONS, **gpus).remote()
        try:
            self._ray.get(actor.start.remote(job.words(replica), dict(job.env)), timeout=WAIT)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise ExecutorError(
                f"--on ray: replica {replica} was not started within {WAIT:.0f} s ({type(error).__name__}); does the "
                f"cluster have a free CPU{' and a free GPU' if gpus else ''}, and is earnest installed on its nodes? "
                f"{first_line(error)}"
            ) from None
        self.running[replica] = (attempt, actor)

    def look(self, handle: Any) -> tuple[int, str] | None:
        try:
            found: tuple[int, str] | None = self._ray.get(handle.poll.remote(), timeout=WAIT)
        except self._ray.exceptions.RayError as error:
            found = (LOST, f"its actor is gone: {first_line(error)}")
        if found is not None:
            self._ray.kill(handle)
        return found

    def stop(self) -> None:
        if self._ray is None:
            return
        asked = [actor.stop.remote() for _, actor in self.running.values()]
        for one in asked:
            try:
                self._ray.get(one, timeout=WAIT)
            except self._ray.exceptions.RayError:
                continue  # it has ended already
        for _, actor in self.running.values():
            self._ray.kill(actor)
        self.running.clear()
        if self._own:
            self._ray.shutdown()
        self._ray = None


def _gpus(job: Job, there: float | None) -> dict[str, Any]:
    """The GPUs that one replica requests: one for each of its ranks, or for one rank with device auto an equal share of
    those ``there``.

    None: of a cluster that is not connected, their number is not known.
    """
    if job.gpu is False or (job.gpu is None and there == 0):
        return {}
    if job.gpu or job.ranks > 1:
        return {"num_gpus": job.ranks}
    return {"num_gpus": "1 or less, if there are any" if there is None else 1 / math.ceil(job.replicas / there)}


def _actors(job: Job) -> int:
    """The number of actors that run at once: a runner for each replica, and the samplers that its worker starts."""
    return job.replicas * (1 + job.samplers)

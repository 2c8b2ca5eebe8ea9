"""Replicas as Monarch actors (torchmonarch): one process mesh of one process, one actor, one ``earnest worker`` each.

--on monarch                                  processes of this host
--on monarch:tcp://host-a:26600,tcp://host-b:26600   hosts that run monarch's ``run_worker_loop_forever``
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from earnest.diloco.executors.base import LOST, WAIT, ExecutorError, Job, Polled, elsewhere, gpu_variables
from earnest.errors import MissingExtra

_log = logging.getLogger(__name__)


def _actor() -> tuple[Any, Any]:
    """(monarch.actor, the actor's class); late, since importing monarch starts its runtime."""
    try:
        import monarch.actor as monarch
    except ImportError:
        raise MissingExtra("torchmonarch", "monarch", "running on Monarch") from None
    from earnest.diloco.executors.monarch_actor import Worker

    # A lost actor would end this process with a KeyboardInterrupt by Monarch's default; here ``poll`` finds it lost.
    monarch.unhandled_fault_hook = lambda failure: _log.warning("a Monarch actor is lost: %s", failure)
    return monarch, Worker


class MonarchExecutor(Polled):
    """``option`` is a comma-separated list of workers' addresses; empty: this host."""

    name: ClassVar[str] = "monarch"

    def __init__(self, option: str = "") -> None:
        super().__init__()
        self.hosts = [host for host in option.split(",") if host]
        for host in self.hosts:
            if not host.startswith("tcp://"):
                raise ExecutorError(
                    f"--on monarch:{option}: {host!r} is not an address; write tcp://HOST:PORT, and commas."
                )
        self._made: tuple[Any, Any] | None = None
        self._mesh: Any = None

    def _job(self, job: Job) -> Job:
        return elsewhere(job, "monarch") if self.hosts else job

    def _number(self, replica: int) -> int:
        """The number of a replica among those on its host."""
        return replica // max(1, len(self.hosts))

    def _place(self, replica: int) -> str:
        return self.hosts[replica % len(self.hosts)] if self.hosts else "this host"

    def dry_run(self, job: Job) -> list[dict[str, Any]]:
        job = self._job(job)
        shown: list[dict[str, Any]] = []
        for i in range(job.replicas):
            # The GPUs of another host are known there only.
            gpu = {"gpu": self._number(i)} if self.hosts and job.gpu is not False else {}
            env = {**({} if self.hosts else gpu_variables(job.gpu, i, job.ranks)), **job.env}
            shown.append({"host": self._place(i), "procs": 1, **gpu, "command": job.command(i), "env": env})
        return shown

    def start(self, job: Job, replica: int, attempt: int) -> None:
        job = self._job(job)
        if self._made is None:
            self._made = _actor()
            self._mesh = self._attach()
        _, worker = self._made
        host = self._mesh.slice(hosts=replica % len(self.hosts)) if self.hosts else self._mesh
        procs = host.spawn_procs(per_host={"procs": 1}, name=f"replica_{replica}_{attempt}")
        actor = procs.spawn(f"worker_{replica}_{attempt}", worker)
        try:
            _one(actor.begin.call_one(job.words(replica), dict(job.env), job.gpu, self._number(replica), job.ranks))
        except Exception as error:  # ActorError, SupervisionError, a timeout: all mean that nothing runs
            raise ExecutorError(
                f"--on monarch: replica {replica} was not started on {self._place(replica)}: {error}"
            ) from None
        self.running[replica] = (attempt, (actor, procs))

    def _attach(self) -> Any:
        monarch, _ = self._made or _actor()
        if not self.hosts:
            return monarch.this_host()
        # Monarch sends the hosts its own address: this machine's name, which on many machines resolves to loopback.
        near = all(host.removeprefix("tcp://").startswith(("127.", "localhost", "[::1]")) for host in self.hosts)
        monarch.enable_transport(monarch.ChannelTransport.TcpWithLocalhost if near else "tcp")
        return monarch.attach_to_workers(ca="trust_all_connections", workers=list(self.hosts))

    def look(self, handle: Any) -> tuple[int, str] | None:
        actor, procs = handle
        try:
            found: tuple[int, str] | None = _one(actor.look.call_one())
        except Exception as error:
            found = (LOST, f"its actor is gone: {str(error).strip().splitlines()[0]}")
        if found is not None:
            _end(procs)
        return found

    def stop(self) -> None:
        asked = [(actor.finish.call_one(), procs) for _, (actor, procs) in self.running.values()]
        self.running.clear()
        for future, procs in asked:
            try:
                _one(future)
            except Exception:  # it has ended already
                continue
            finally:
                _end(procs)


def _one(future: Any) -> Any:
    return future.get(timeout=WAIT)


def _end(procs: Any) -> None:
    try:
        procs.stop().get(timeout=WAIT)
    except Exception:  # a lost mesh has stopped already
        return

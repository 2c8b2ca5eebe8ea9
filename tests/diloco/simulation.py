"""Replicas under a scheduler that decides every store operation: who goes next, who dies, which answer is lost.

Each replica is a thread that runs the real outer hook on a toy job. It stops before every operation on the store (and
before every sleep) until the scheduler lets it continue; so exactly one uses the store at a time, and a schedule is a
list of orders. With a delay the exchange runs in a thread beside the training, which waits for it before it uses the
store. Only the code under test is real: the store is a dict, and the clock moves when a replica sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from earnest.diloco.ledger import Ledger
from earnest.diloco.manager import BucketManager
from earnest.diloco.outer import ReplicaOuter, SyncSchedule
from earnest.diloco.protocol import Rules
from earnest.diloco.wire import Wire
from earnest.store import AlreadyThere, Bucket, Unavailable, unseal
from tests.diloco.toy import ToyEngine

Order = Literal["go", "die before", "die after", "lose the answer", "fail", "tear"]


class Killed(BaseException):
    """SIGKILL for a thread."""


@dataclass
class World:
    """What all replicas share: the objects, every object that ever existed, and the time."""

    objects: dict[str, bytes] = field(default_factory=dict)
    history: dict[str, bytes] = field(default_factory=dict)
    time: float = 0.0
    again: list[str] = field(default_factory=list)
    """Keys that were cleaned up and then created once more."""
    weights: list[tuple[str, int, int]] = field(default_factory=list)
    """Of each delta that was given to the store: its key, the tokens that it claims, the tokens it was trained on."""


@dataclass
class Trained:
    """Tokens that each fragment was trained on since it was last averaged; ``taken``: by round, their number when
    torchft took the difference. It is counted from the calls that torchft makes, apart from the code under test."""

    counts: list[int]
    taken: dict[int, int] = field(default_factory=dict)

    def watch(self, manager: BucketManager) -> None:
        allreduce, should_commit = manager.allreduce, manager.should_commit

        def take(*args: Any, **more: Any) -> Any:
            k = manager.globals.round
            self.taken[k] = self.counts[k % len(self.counts)]
            return allreduce(*args, **more)

        def meet(*args: Any, **more: Any) -> bool:
            self.counts[manager.globals.round % len(self.counts)] = 0
            return should_commit(*args, **more)

        manager.allreduce, manager.should_commit = take, meet  # type: ignore[method-assign]


class Port:
    """One replica's access to the store; the scheduler stops the replica here."""

    def __init__(self, world: World, trained: Trained) -> None:
        self.world, self.trained = world, trained
        self.order: Order = "go"
        self.arrived, self.granted = threading.Semaphore(0), threading.Semaphore(0)
        self.waiting_for = ""

    def _turn(self, what: str, act: Callable[[bool], Any]) -> Any:
        self.waiting_for = what
        self.arrived.release()
        self.granted.acquire()
        order = self.order
        if order == "die before":
            raise Killed
        if order == "fail":
            raise Unavailable("no answer")
        result = act(order == "tear")
        if order == "die after":
            raise Killed
        if order == "lose the answer":
            raise Unavailable("the answer was lost")
        return result

    def create(self, key: str, data: bytes) -> None:
        if "/delta/" in key:
            meta = unseal(key, data).meta
            self.world.weights.append((key, meta["tokens"], self.trained.taken[meta["round"]]))

        def act(tear: bool) -> None:
            if key in self.world.objects:
                raise AlreadyThere(key)
            if key in self.world.history:
                self.world.again.append(key)
            torn = tear and ("/delta/" in key or key.startswith("state/")) and not key.endswith("state/00000000")
            self.world.objects[key] = data[: len(data) // 2] if torn else data
            self.world.history.setdefault(key, self.world.objects[key])

        self._turn(f"create {key}", act)

    def get(self, key: str) -> bytes | None:
        return self._turn(f"get {key}", lambda tear: self.world.objects.get(key))

    def list(self, prefix: str) -> Any:
        return self._turn(f"list {prefix}", lambda tear: [k for k in self.world.objects if k.startswith(prefix)])

    def delete(self, keys: Any) -> None:
        def act(tear: bool) -> None:
            for key in keys:
                self.world.objects.pop(key, None)

        self._turn(f"delete {len(keys)}", act)

    def sleep(self, seconds: float) -> None:
        def act(tear: bool) -> None:
            self.world.time += seconds

        with suppress(Unavailable):  # a sleep has no answer that could be lost
            self._turn("sleep", act)


@dataclass
class Disk:
    """What survives when the process dies and the machine does not."""

    weights: list[Tensor] = field(default_factory=list)
    optimizer: Any = None
    outer: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    trained: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    replicas: int
    rounds: int
    quorum: int
    grace: float
    snapshot_every: int
    schedule: SyncSchedule
    wire: Wire


class Replica:
    """A process and its restarts; ``copy`` tells those apart that were started with one number.

    ``finished``: round → the fingerprint with which it left it, over all lives.
    """

    def __init__(self, world: World, job: Job, number: int, copy: int = 0) -> None:
        self.world, self.job, self.number, self.copy = world, job, number, copy
        self.disk = Disk()
        self.finished: list[tuple[int, str]] = []
        self.final: str | None = None
        self.error: BaseException | None = None
        self.lives = 0
        self.alive = False
        self.port: Port
        self.thread: threading.Thread

    def start(self, keep_disk: bool) -> None:
        if not keep_disk:
            self.disk = Disk()
        self.lives += 1
        self.alive = True
        self.trained = Trained([0] * self.job.schedule.fragments)
        self.port = Port(self.world, self.trained)
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()
        self.port.arrived.acquire()

    def step(self, order: Order = "go") -> None:
        """Let it take its next operation, in this way, and run until the one after it."""
        if self.alive:
            self.port.order = order
            self.port.granted.release()
            self.port.arrived.acquire()

    def _live(self) -> None:
        try:
            self._train()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.alive = False
            self.port.arrived.release()

    def _train(self) -> None:
        job, port = self.job, self.port
        bucket = Bucket(port, writer=f"{self.number}.{self.copy}.{self.lives}", patience=1e9, sleep=port.sleep)
        engine = ToyEngine(self.number, sizes=(3, 2))
        rules = Rules(job.replicas, job.quorum, job.grace, timeout=1e9, poll=0.5)
        outer = ReplicaOuter(
            engine,
            Ledger(bucket, parallel=1),  # exactly one thread of all runs at a time
            self.number,
            rules,
            job.schedule,
            job.wire,
            rounds=job.rounds,
            snapshot_every=job.snapshot_every,
        )
        self.trained.watch(outer.manager)
        outer.manager.clock, outer.manager.sleep = (lambda: self.world.time), port.sleep
        if self.disk.weights:
            for p, w in zip(engine.parameters, self.disk.weights, strict=True):
                p.data.copy_(w)
            engine.optimizer.load_state_dict(self.disk.optimizer)
            outer.load_state_dict(self.disk.outer)
            engine.version = self.disk.version
        if outer.join(engine) and self.disk.weights:
            self.trained.counts[:] = self.disk.trained
        engine.outer = outer  # type: ignore[assignment]
        engine.version = outer.updates
        while not outer.over:
            before = outer.round
            tokens = 1 + (7 * self.number + 3 * engine.version) % 11  # no two replicas and no two updates alike
            self.trained.counts[:] = [count + tokens for count in self.trained.counts]
            if engine.step(tokens).get("healed"):
                self.trained.counts[:] = [0] * job.schedule.fragments
            engine.version = outer.updates
            if outer.between:
                if outer.round == before + 1 and not outer.manager.pending:
                    self.finished.append((before, outer.globals.fingerprint()))
                self._save(engine, outer)
        self.final = outer.globals.fingerprint()

    def _save(self, engine: ToyEngine, outer: ReplicaOuter) -> None:
        import copy

        self.disk = Disk(
            [p.detach().clone() for p in engine.parameters],
            copy.deepcopy(engine.optimizer.state_dict()),
            outer.state_dict(),
            engine.version,
            list(self.trained.counts),
        )

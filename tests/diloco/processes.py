"""Real replicas in real processes that kill themselves at given points.

A process is forked from a server that has everything imported (a replica is up in about a second) and then runs
``earnest.diloco.worker.work``, what ``earnest worker`` runs. A point is a place in the worker at which it sends itself
SIGKILL, the n-th time it reaches that place.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.runs.tiny import recipe

POINTS = (
    "before the upload",
    "after the upload",
    "before the commit",
    "after the commit",
    "during a download",
    "during a checkpoint",
    "after a checkpoint",
    "before a snapshot",
    "after a snapshot",
    "after the announcement",
    "in the middle of training",
)


def context() -> Any:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.diloco.preload"])
    return made


def put_run(url: str, place: Path, model: Path, *overrides: str) -> None:
    """A run on the tiny model, in a bucket."""
    from earnest.config import dump, load_file
    from earnest.diloco.launch import _put

    config = load_file(recipe(place / "recipe.yaml", model), overrides)
    _put(url, "test", dump(config))


def die(point: str, times: int) -> None:
    """Let this process kill itself the ``times``-th time that it comes to ``point``."""
    from earnest.diloco.ledger import Ledger
    from earnest.runs import checkpoints
    from earnest.runs.loop import TrainingLoop

    left = [times]

    def now() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str, before: bool) -> None:
        old: Callable[..., Any] = getattr(owner, name)

        def new(*args: Any, **kwargs: Any) -> Any:
            if before:
                now()
            result = old(*args, **kwargs)
            if not before:
                now()
            return result

        setattr(owner, name, new)

    places: dict[str, tuple[Any, str, bool]] = {
        "before the upload": (Ledger, "put_delta", True),
        "after the upload": (Ledger, "put_delta", False),
        "before the commit": (Ledger, "put_commit", True),
        "after the commit": (Ledger, "put_commit", False),
        "during a checkpoint": (checkpoints, "write_json", False),
        "after a checkpoint": (checkpoints, "save", False),
        "before a snapshot": (Ledger, "put_state", True),
        "after a snapshot": (Ledger, "put_state", False),
        "after the announcement": (Ledger, "announce", False),
        "in the middle of training": (TrainingLoop, "_one_step", False),
    }
    if point == "during a download":
        _in_a_download(now)
    else:
        around(*places[point])


def _in_a_download(now: Callable[[], None]) -> None:
    """Between the store's answer to the request for a delta and its bytes."""
    from earnest.store import ObjectStore

    old = ObjectStore.get

    def get(self: Any, key: str) -> bytes | None:
        if "/delta/" in key:
            with suppress(*self._absent, *self._failures):
                answer = self._api.get(self._store, key)
                now()
                return bytes(answer.bytes())
        return old(self, key)

    ObjectStore.get = get  # type: ignore[method-assign]


def main(url: str, replica: int, folder: str, environment: Mapping[str, str], plan: Mapping[str, Any]) -> None:
    """Run as a replica. ``plan``: die (point, times), stall (round, seconds), skew (seconds), junk (round)."""
    os.environ.update(environment)
    log = open(f"{folder}.log", "a", buffering=1)  # noqa: SIM115 (as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    from rich.console import Console

    from earnest.diloco.worker import work

    if "die" in plan:
        die(*plan["die"])
    if "skew" in plan:
        skew(plan["skew"])
    if "stall" in plan:
        stall(*plan["stall"])
    if "junk" in plan:
        junk(plan["junk"])
    if "tear" in plan:
        tear()
    work(url, replica, Path(folder), Console(file=io.StringIO()))


def skew(seconds: float) -> None:
    """A wall clock that is wrong, and runs at half speed."""
    real, began = time.time, time.time()
    time.time = lambda: began + seconds + (real() - began) / 2


def stall(at: int, seconds: float) -> None:
    """Hang before the upload of round ``at``, as a machine that swaps or loses its network."""
    from earnest.diloco.ledger import Ledger

    old = Ledger.put_delta

    def slow(self: Any, k: int, *args: Any) -> bool:
        if k == at:
            time.sleep(seconds)
        return old(self, k, *args)

    Ledger.put_delta = slow  # type: ignore[method-assign]


def junk(at: int) -> None:
    """Change the global weights in this replica's memory at the start of round ``at``."""
    from earnest.diloco.outer import ReplicaOuter

    old = ReplicaOuter.after_update

    def bad(self: Any, engine: Any) -> Any:
        if self.round == at and self.inner == 0 and not self.heals:
            for fragment in self._algorithm._fragments:
                for held in fragment.original_parameters.values():
                    held.add_(1.0)
        return old(self, engine)

    ReplicaOuter.after_update = bad  # type: ignore[method-assign]


def tear() -> None:
    """The first delta of this process is stored incompletely, though the store reports success."""
    from earnest.store import ObjectStore

    old, left = ObjectStore.create, [1]

    def cut(self: Any, key: str, data: bytes) -> None:
        if "/delta/" in key and left[0]:
            left[0] = 0
            data = data[: len(data) // 2]
        old(self, key, data)

    ObjectStore.create = cut  # type: ignore[method-assign]


class ReplicaProcesses:
    """Replicas of one run, restarted whenever they die; ``plans`` gives the faults of each process."""

    def __init__(
        self,
        ctx: Any,
        url: str,
        place: Path,
        environment: Mapping[str, str],
        plans: Callable[[int, int], Mapping[str, Any]],
        target: Callable[..., None] = main,
    ) -> None:
        self.ctx, self.url, self.place, self.environment, self.plans = ctx, url, place, environment, plans
        self.target = target
        self.running: dict[str, Any] = {}
        self.lives: dict[str, int] = {}
        self.kills = 0

    def start(self, name: str, replica: int) -> None:
        life = self.lives[name] = self.lives.get(name, 0) + 1
        plan = self.plans(replica, life)
        words = (self.url, replica, str(self.place / name), self.environment, plan)
        process = self.ctx.Process(target=self.target, args=words, daemon=True)
        process.start()
        self.running[name] = (process, replica)

    def run(self, names: Mapping[str, int], between: Callable[[], None] = lambda: None, seconds: float = 600) -> None:
        """Until every one of ``names`` (folder → replica number) reached the end of the run."""
        for name, replica in names.items():
            self.start(name, replica)
        end = time.monotonic() + seconds
        while self.running:
            assert time.monotonic() < end, {n: (self.place / f"{n}.log").read_text()[-1500:] for n in self.running}
            between()
            for name, (process, replica) in list(self.running.items()):
                if process.is_alive():
                    continue
                process.join()
                del self.running[name]
                if process.exitcode == -signal.SIGKILL:
                    self.kills += 1
                    self.start(name, replica)
                else:
                    assert process.exitcode == 0, (self.place / f"{name}.log").read_text()[-3000:]
            time.sleep(0.05)

    def stop(self) -> None:
        for process, _ in self.running.values():
            process.kill()
            process.join()
        self.running.clear()


def weights(folder: Path) -> dict[str, Any]:
    """The adapter and the agreed state in the newest checkpoint of a replica's folder, and the round they are of."""
    from earnest.engines.checkpoint import read
    from earnest.runs.checkpoints import ENGINE

    newest = max((folder / "checkpoints").glob("step-*"), key=lambda p: p.name)
    tensors, _ = read(newest / ENGINE)
    return {k: v for k, v in tensors.items() if k.startswith(("adapter.", "outer.global.")) or k == "outer.round"}


def commits(ledger: Any) -> dict[int, Any]:
    """What is committed and not cleaned up yet."""
    rounds = sorted({int(k.split("/")[1]) for k in ledger.bucket.list("outer/") if k.endswith("/commit")})
    return {k: ledger.commit(k) for k in rounds}


def events(folder: Path) -> list[str]:
    return (folder / "events.log").read_text().splitlines()

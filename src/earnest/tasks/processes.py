"""The user's code in processes of its own, so that a time limit holds for any code.

A thread cannot be interrupted, and code that holds the interpreter's lock (a regular expression with exponential
backtracking, a loop in C) stops every thread of its process. A worker process is ended instead, and another one takes
its place. Workers are started when they are needed, kept for the next gradings, and end with this process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import select
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

WORKERS = max(2, min(8, os.cpu_count() or 2))
"""Processes at the same time."""
LONGEST_LOAD = 600.0
"""Seconds that a process may take to start and to import the user's code."""
IMPORTED = "earnest_import_"  # the modules of the user's files (``plugins``)


RAISED_AT = "earnest_raised_at"
"""The attribute in which a worker keeps the place of an error, because a pickled exception has no traceback."""
_EARNEST = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


def raised_at(error: Exception) -> str:
    """The last line of the user's own code that the error passed through, or else of a library, in brackets after a
    space: " (my_rewards.py:12, in score)". Nothing if earnest raised it."""
    if (kept := getattr(error, RAISED_AT, None)) is not None:
        return str(kept)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_EARNEST, "<"))]
    found = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames
    return f" ({found[-1].filename}:{found[-1].lineno}, in {found[-1].name})" if found else ""


class GradingTimeout(TimeoutError):
    """A grading did not end within its time limit."""


class Clock(threading.local):
    """The time limit of this thread's grading. The wait for a free worker does not count: ``begin`` starts the time."""

    limit: float = 60.0
    begin: Callable[[], None] = staticmethod(lambda: None)


CLOCK = Clock()


class _Worker:
    """One process, and the subjects that it has received."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "earnest.tasks.worker"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.known: set[str] = set()

    def load(self, key: str, subject: bytes) -> None:
        """Give the process a subject, once. Its imports have no short limit, since they ended here before."""
        if key not in self.known:
            self._exchange((key, subject, None), LONGEST_LOAD)
            self.known.add(key)

    def ask(self, key: str, arguments: tuple[Any, ...], limit: float) -> Any:
        """The result of the subject, within ``limit`` seconds."""
        return self._exchange((key, None, arguments), limit)

    def _exchange(self, message: tuple[Any, ...], limit: float) -> Any:
        assert self.process.stdin is not None, "it is a pipe"
        deadline = time.monotonic() + limit
        sent = pickle.dumps(message)
        try:
            self.process.stdin.write(sent)
            self.process.stdin.flush()
            size = int.from_bytes(self._read(8, deadline, limit), "big")
            done, found = pickle.loads(self._read(size, deadline, limit))
        except (BrokenPipeError, EOFError):
            self.process.wait()
            raise RuntimeError(f"the process of the grader ended with status {self.process.returncode}") from None
        if done:
            return found
        raise found

    def _read(self, size: int, deadline: float, limit: float) -> bytes:
        assert self.process.stdout is not None, "it is a pipe"
        found, number = b"", self.process.stdout.fileno()
        while len(found) < size:
            if not select.select([number], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise GradingTimeout(f"the grading took more than {limit:g} seconds")
            part = os.read(number, size - len(found))
            if not part:
                raise EOFError
            found += part
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a message that was not read
                    pipe.close()


@dataclass
class _Pool:
    """Workers that wait for work, and how many there are in all."""

    free: list[_Worker] = field(default_factory=list)
    count: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def ask(self, key: str, subject: bytes, arguments: tuple[Any, ...], limit: float) -> Any:
        worker = self._take()
        try:
            worker.load(key, subject)
            CLOCK.begin()
            found = worker.ask(key, arguments, limit)
        except (GradingTimeout, RuntimeError) as error:
            if isinstance(error, GradingTimeout) or worker.process.poll() is not None:
                worker.end()
                self._give(None)
            else:
                self._give(worker)
            raise
        except BaseException:
            self._give(worker)
            raise
        self._give(worker)
        return found

    def _take(self) -> _Worker:
        with self.changed:
            while not self.free and self.count >= WORKERS:
                self.changed.wait()
            if self.free:
                return self.free.pop()
            self.count += 1
        try:
            return _Worker()
        except BaseException:
            self._give(None)
            raise

    def _give(self, worker: _Worker | None) -> None:
        with self.changed:
            if worker is None:
                self.count -= 1
            else:
                self.free.append(worker)
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            for worker in self.free:
                worker.end()
                self.count -= 1
            self.free.clear()


POOL = _Pool()
atexit.register(POOL.close)


@dataclass(frozen=True)
class Isolated:
    """A callable that runs in a worker process, with the limit of ``CLOCK``. It must have a pickled form."""

    run: Callable[..., Any]

    @cached_property
    def subject(self) -> tuple[str, bytes]:
        files = [m.__file__ for name, m in list(sys.modules.items()) if name.startswith(IMPORTED) and m.__file__]
        made = pickle.dumps((list(sys.path), files, pickle.dumps(self.run)))
        return hashlib.sha256(made).hexdigest(), made

    def __call__(self, *arguments: Any) -> Any:
        return POOL.ask(*self.subject, arguments, CLOCK.limit)


def isolated(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function in worker processes; itself if it has no pickled form (a lambda, a local function), and on
    Windows, where a pipe has no time limit."""
    made = Isolated(run)
    try:
        return made if os.name != "nt" and made.subject else run
    except Exception:  # pickling calls the user's code
        return run

"""Requests under way: every one has an id, is carried out once, and its result waits to be fetched.

A model's requests carry numbers 1, 2, 3, … and are carried out in this order, however they arrive (the SDK sends the
parts of one batch at once, the first one last). A number that was seen before is the same request sent again: it gets
the same id and is not carried out twice. A number that never comes fails those behind it, after ``GAP`` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from earnest.errors import EarnestError
from earnest.serve.tinker.data import Failed, Result
from earnest.serve.tinker.errors import NotThere, WireError

log = logging.getLogger("earnest.serve")
KEPT = 4096
GAP = 120.0
Work = Callable[[], Result]


def outcome(work: Work) -> Result:
    """The result of some work; an error becomes one that says whose fault it was."""
    try:
        return work()
    except EarnestError as error:
        return Failed(str(error), "user")
    except Exception as error:
        log.exception("a request failed")
        return Failed(f"{type(error).__name__}: {error}", "server")


@dataclass(eq=False)
class Promise:
    """A request that was accepted. Its result is set once, by one thread, and awaited in the event loop."""

    id: str
    facts: dict[str, object] = field(default_factory=dict)
    result: Result | None = None
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, result: Result) -> None:
        with self._lock:
            assert self.result is None, "a request is carried out once"
            self.result = result
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def wait(self, seconds: float) -> Result | None:
        event = asyncio.Event()
        with self._lock:
            if self.result is not None:
                return self.result
            self._waiting.append((asyncio.get_running_loop(), event))
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return None
        return self.result


class Promises:
    """All promises by id; the oldest finished ones are forgotten beyond ``KEPT``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Promise] = OrderedDict()

    def make(self, id: str, **facts: object) -> tuple[Promise, bool]:
        """The promise of this id, and whether it is new."""
        with self._lock:
            if id in self._all:
                return self._all[id], False
            promise = self._all[id] = Promise(id, facts)
            while len(self._all) > KEPT:
                done = next((k for k, p in self._all.items() if p.result is not None), None)
                if done is None:
                    break
                del self._all[done]
            return promise, True

    def get(self, id: str) -> Promise:
        promise = self._all.get(id)
        if promise is None:
            raise NotThere(f"there is no request {id!r}; it was never made here, or its result is long gone.")
        return promise


@dataclass(eq=False)
class _Line:
    """A model's requests: what waits by number, and the number that is next."""

    next: int = 1
    waiting: dict[int, tuple[Promise, Work]] = field(default_factory=dict)
    free: list[tuple[Promise, Work]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)

    def pop(self) -> tuple[Promise, Work] | None:
        if self.free:
            return self.free.pop(0)
        if self.next in self.waiting:
            self.next += 1
            self.since = time.monotonic()
            return self.waiting.pop(self.next - 1)
        if not self.waiting:
            self.since = time.monotonic()
        elif time.monotonic() - self.since > GAP:
            first = min(self.waiting)
            missing, (promise, _) = self.next, self.waiting.pop(first)
            self.next = first + 1

            def say() -> Result:
                raise WireError(f"request {missing} of this model never arrived, so request {first} cannot follow it.")

            return promise, say
        return None


class Lines:
    """One thread that carries out the requests of all models, each model's in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, line: str, seq: int | None, promise: Promise, work: Work) -> None:
        with self._changed:
            if self._closed:
                raise WireError("the server is shutting down.", 503)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="earnest-tinker", daemon=True)
                self._thread.start()
            own = self._lines.setdefault(line, _Line())
            if seq is None:
                own.free.append((promise, work))
            elif seq < own.next:
                promise.set(Failed(f"request {seq} of this model is long past; {own.next} is next.", "user"))
            else:
                own.waiting[seq] = (promise, work)
            self._changed.notify()

    def close(self) -> None:
        """Finish what is being carried out; what waits is failed."""
        with self._changed:
            self._closed = True
            left = [job for line in self._lines.values() for job in (*line.free, *line.waiting.values())]
            self._lines.clear()
            self._changed.notify()
        for promise, _ in left:
            promise.set(Failed("the server is shutting down.", "server"))
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                job = self._next()
                while job is None and not self._closed:
                    self._changed.wait(1.0)
                    job = self._next()
            if job is None:
                return
            promise, work = job
            promise.set(outcome(work))

    def _next(self) -> tuple[Promise, Work] | None:
        for name in list(self._lines):
            if (job := self._lines[name].pop()) is not None:
                self._lines[name] = self._lines.pop(name)  # the next one looks at another model first
                return job
        return None

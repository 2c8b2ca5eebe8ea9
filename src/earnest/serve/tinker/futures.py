"""Requests under way: every one has an id, is carried out once, and its result waits to be fetched.

A model's requests carry numbers 1, 2, 3, … and are carried out in this order, however they arrive (the SDK sends the
parts of one batch at once, the first one last). A number that was seen before is the same request sent again: it gets
the same id and is not carried out twice. A number that does not come fails the request that waits for it, after
``GAP`` seconds.

Results are kept to be fetched again where an answer was lost: ``KEPT`` of them and ``BYTES`` together, those that were
fetched already leave first.
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
from earnest.serve.tinker.data import Failed, PassOutput, Result, SampleOutput
from earnest.serve.tinker.errors import NotThere, WireError

log = logging.getLogger("earnest.serve")
KEPT = 4096
BYTES = 1 << 30
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


def size(result: Result) -> int:
    """About how many bytes a result takes: its tensors exactly, a Python number as 32, a plain one as 1,000."""
    if isinstance(result, PassOutput):
        return sum(t.nbytes for t in result.logprobs)
    if not isinstance(result, SampleOutput):
        return 1000
    tops = [result.top_prompt, *(s.top for s in result.sequences)]
    tensors = [t for top in tops if top is not None for t in (top.ids, top.logprobs)]
    if result.targets is not None:
        tensors += [t for t in (result.targets.values, result.targets.rows, result.targets.columns) if t is not None]
    tensors += result.alternatives or ()
    numbers = len(result.prompt or ()) + sum(2 * len(s.tokens) for s in result.sequences)
    return 32 * numbers + sum(t.nbytes for t in tensors)


@dataclass(eq=False)
class Promise:
    """A request that was accepted. Its result is set once, by one thread, and awaited in the event loop."""

    id: str
    facts: dict[str, object] = field(default_factory=dict)
    result: Result | None = None
    fetched: bool = False
    size: int | None = None  # of its result, once that is counted
    kept: Callable[[Promise], None] | None = None
    _waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, result: Result) -> None:
        with self._lock:
            assert self.result is None, "a request is carried out once"
            self.result = result
            waiting, self._waiting = self._waiting, []
        if self.kept is not None:
            self.kept(self)
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
    """All promises by id; beyond ``KEPT`` or ``BYTES`` finished ones are forgotten, fetched ones and old ones first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Promise] = OrderedDict()
        self._bytes = 0

    def make(self, id: str, **facts: object) -> tuple[Promise, bool]:
        """The promise of this id, and whether it is new."""
        with self._lock:
            if id in self._all:
                return self._all[id], False
            promise = self._all[id] = Promise(id, facts, kept=self._kept)
            self._trim(promise)
            return promise, True

    def _kept(self, promise: Promise) -> None:
        """A result has come in."""
        assert promise.result is not None
        with self._lock:
            self._bytes += (found := size(promise.result))
            promise.size = found
            self._trim(promise)

    def _trim(self, newest: Promise) -> None:
        """Never the newest: a single result above ``BYTES`` can be fetched, too."""
        if len(self._all) <= KEPT and self._bytes <= BYTES:
            return
        done = [(p, p.size) for p in self._all.values() if p.size is not None and p is not newest]
        for promise, freed in sorted(done, key=lambda d: not d[0].fetched):  # stable: the oldest first on either side
            if len(self._all) <= KEPT and self._bytes <= BYTES:
                return
            del self._all[promise.id]
            self._bytes -= freed

    def get(self, id: str) -> Promise:
        promise = self._all.get(id)
        if promise is None:
            raise NotThere(f"there is no request {id!r}; it was never made here, or its result is long gone.")
        return promise


@dataclass(eq=False)
class _Line:
    """A model's requests: what waits by number, and the number that is next; ``since`` when the next one is missed."""

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
        if self.waiting and time.monotonic() - self.since > GAP:
            first = min(self.waiting)
            missing, (promise, _) = self.next, self.waiting.pop(first)
            self.next = first + 1
            self.since = time.monotonic()

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
                if not own.waiting:  # not when the thread last looked: another model's pass may have taken longer
                    own.since = time.monotonic()
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

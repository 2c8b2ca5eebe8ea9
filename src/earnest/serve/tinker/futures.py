"""Accepted requests: each has an id, is carried out once, and its result waits to be fetched.

A model's requests carry the numbers 1, 2, 3, … and are carried out in this order, however they arrive (the SDK sends
the parts of one batch at once, the first one last). A number that was seen before is the same request sent again: it
gets the same id and is not carried out twice. A number that was refused counts as carried out. A number that does not
arrive within ``GAP`` seconds fails the request that waits for it.

Results are kept so that they can be fetched again where an answer was lost: at most ``KEPT`` of them and ``BYTES``
together; those that were fetched already are forgotten first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from earnest.errors import EarnestError
from earnest.serve.tinker.data import Failed, JsonResult, PassOutput, Result, SampleOutput
from earnest.serve.tinker.errors import TOO_DEEP, NotThere, WireError

log = logging.getLogger("earnest.serve")
KEPT = 4096
BYTES = 1 << 30
GAP = 120.0
Work = Callable[[], Result]


def failure(error: BaseException) -> Failed:
    """An error as a result: the client's mistakes as such, all others logged and counted as the server's."""
    if isinstance(error, EarnestError):
        return Failed(str(error), "user")
    if isinstance(error, RecursionError):
        return Failed(TOO_DEEP, "user")
    log.error("a request failed", exc_info=error)
    return Failed(f"{type(error).__name__}: {error}", "server")


def size(result: Result) -> int:
    """About how many bytes a result takes: its tensors exactly, a Python number as 32, a plain result as 1,000."""
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
    """An accepted request. One thread sets its result, once; the event loop awaits it."""

    id: str
    facts: dict[str, object] = field(default_factory=dict)
    fetched: bool = False
    size: int | None = None  # of its result in bytes, once it is counted
    future: Future[Result] = field(default_factory=Future)

    @property
    def result(self) -> Result | None:
        return self.future.result() if self.future.done() else None

    def set(self, result: Result) -> None:
        self.future.set_result(result)

    async def wait(self, seconds: float) -> Result | None:
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self.future)), seconds)
        except TimeoutError:
            return None


class Promises:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Promise] = OrderedDict()
        self._bytes = 0

    def make(self, id: str, **facts: object) -> tuple[Promise, bool]:
        """The promise of this id, and whether it is new."""
        with self._lock:
            if id in self._all:
                return self._all[id], False
            promise = self._all[id] = Promise(id, facts)
            self._trim(promise)
        promise.future.add_done_callback(lambda future: self._count(promise, future.result()))
        return promise, True

    def _count(self, promise: Promise, result: Result) -> None:
        with self._lock:
            promise.size = size(result)
            self._bytes += promise.size
            self._trim(promise)

    def _trim(self, newest: Promise) -> None:
        """Forget results beyond the limits. Never the newest: a single result above ``BYTES`` can be fetched, too."""
        if len(self._all) <= KEPT and self._bytes <= BYTES:
            return
        done = [(p, p.size) for p in self._all.values() if p.size is not None and p is not newest]
        for promise, freed in sorted(done, key=lambda d: not d[0].fetched):  # stable: of equals the oldest first
            if len(self._all) <= KEPT and self._bytes <= BYTES:
                return
            del self._all[promise.id]
            self._bytes -= freed

    def get(self, id: str) -> Promise:
        promise = self._all.get(id)
        if promise is None:
            raise NotThere(f"there is no request {id!r}; it was never made here, or its result was forgotten.")
        return promise


@dataclass(eq=False)
class _Queue:
    """One model's requests: ``free`` ones without a number, those that wait by number, and the number that is next.
    ``since`` is the time since which the next one is missing."""

    next: int = 1
    waiting: dict[int, tuple[Promise, Work]] = field(default_factory=dict)
    free: list[tuple[Promise, Work]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)

    def pop(self) -> tuple[Promise, Work] | None:
        """The request to carry out now."""
        if self.free:
            return self.free.pop(0)
        missing = self.next
        if missing not in self.waiting and (not self.waiting or time.monotonic() - self.since <= GAP):
            return None
        first = min(self.waiting)
        promise, work = self.waiting.pop(first)
        self.next, self.since = first + 1, time.monotonic()

        def fail() -> Result:
            raise WireError(f"request {missing} of this model never arrived, so request {first} cannot follow it.")

        return promise, work if first == missing else fail


class RequestQueues:
    """One thread that carries out the requests of all models, each model's in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, _Queue] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, model: str, seq: int | None, promise: Promise, work: Work) -> None:
        with self._changed:
            if self._closed:
                raise WireError("the server is shutting down.", 503)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="earnest-tinker", daemon=True)
                self._thread.start()
            queue = self._queues.setdefault(model, _Queue())
            if seq is None:
                queue.free.append((promise, work))
            elif seq < queue.next:
                promise.set(Failed(f"request {seq} of this model is past; {queue.next} is next.", "user"))
            else:
                if not queue.waiting:  # the wait begins now, however long ago the thread looked at this queue
                    queue.since = time.monotonic()
                queue.waiting[seq] = (promise, work)
            self._changed.notify()

    def skip(self, model: str, seq: int) -> None:
        """Count a refused request as carried out, so that the next one of its model does not wait for it."""
        with self._changed:
            if not self._closed and seq not in self._queues.setdefault(model, _Queue()).waiting:
                self.put(model, seq, Promise(f"{model}:{seq}"), JsonResult)

    def close(self) -> None:
        """Finish the request that is being carried out and fail those that wait."""
        with self._changed:
            self._closed = True
            left = [job for queue in self._queues.values() for job in (*queue.free, *queue.waiting.values())]
            self._queues.clear()
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
            try:
                result = work()
            except Exception as error:
                result = failure(error)
            promise.set(result)

    def _next(self) -> tuple[Promise, Work] | None:
        for model in list(self._queues):
            if (job := self._queues[model].pop()) is not None:
                self._queues[model] = self._queues.pop(model)  # to the end: the other models come first
                return job
        return None

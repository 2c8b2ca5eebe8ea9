"""Samplers that work ahead of the trainer: one thread for each, which pushes, probes and samples.

    sampler thread    start → push and probe the newest weights → work(batch, part) → finish
    trainer           publish (after each update) → take → train → publish → …

``RolloutLedger`` decides who waits for whom. ``partial`` is what happens to a part that is under way when new weights
arrive (`earnest.sync.partial`). A sampler that dies is started again, and its part is sampled again. What
a sampler raises otherwise is raised in the trainer's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from earnest.errors import SamplingError
from earnest.rollouts.attempts import Sample
from earnest.rollouts.ledger import PartTicket, RolloutLedger, TakenBatch
from earnest.sync.base import SamplerLost
from earnest.sync.partial import RESTARTS, Outdated, Partial, PartialSampling
from earnest.sync.probe import Link, Target

T = TypeVar("T")
TRIES = 3
"""Deaths of one sampler in a row before the run stops."""

Work = Callable[[int, int, Sample, bool], T]
"""work(batch, part, sample, fresh): what this sampler samples of a part; ``fresh``: the first with its weights."""


class Idle:
    """The share of time that somebody waited since ``share`` was last called."""

    def __init__(self, count: int = 1) -> None:
        self.count, self.waited, self._since = count, 0.0, time.perf_counter()

    def share(self) -> float:
        now = time.perf_counter()
        passed, waited = now - self._since, self.waited
        self._since, self.waited = now, 0.0
        return min(1.0, waited / (passed * self.count)) if passed > 0 else 0.0


class Flow(Generic[T]):
    """The threads of the samplers ``links``, and the trainer's side of the queue."""

    def __init__(
        self,
        links: Sequence[Link],
        ledger: RolloutLedger[T],
        target: Target,
        work: Work[T],
        partial: Partial = "finish",
    ) -> None:
        self.ledger, self.restarts, self.partial = ledger, 0, partial
        self.trainer, self.samplers = Idle(), Idle(len(links))
        self._links, self._target, self._work = links, target, work
        self._state = threading.Condition()
        self._busy, self._paused, self._closed = 0, False, False
        self._error: Exception | None = None
        ledger.version = target.weights.version
        self._threads = [
            threading.Thread(target=self._run, args=(link,), name=link.sampler.place, daemon=True) for link in links
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, target: Target) -> None:
        """The batch that was taken is trained; samplers take these weights for their next part."""
        with self._state:
            self._target = target
            self.ledger.done(target.weights.version)
            self._state.notify_all()

    def take(self) -> TakenBatch[T]:
        """Wait for the next batch."""
        began = time.perf_counter()
        with self._state:
            while (taken := self.ledger.take()) is None:
                self._raise()
                self._state.notify_all()  # parts that became too old can be started
                self._state.wait()
            self._state.notify_all()
        self.trainer.waited += time.perf_counter() - began
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block the samplers are free: each has finished its part."""
        with self._state:
            self._paused = True
            while self._busy:
                self._raise()
                self._state.wait()
        try:
            yield
        finally:
            with self._state:
                self._paused = False
                self._state.notify_all()

    def close(self) -> None:
        """Let the threads end; those that wait for an answer end with it."""
        with self._state:
            self._closed = True
            self._state.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, link: Link) -> None:
        """A sampler's thread."""
        deaths = 0
        while (given := self._next()) is not None:
            ticket, target = given
            try:
                deaths = 0 if self._sampled(link, ticket, target) else deaths + 1
                if deaths and not self._closed:
                    if deaths == TRIES:
                        raise SamplingError(f"{link.sampler.place} died {TRIES} times in a row; see its log.")
                    link.sampler.restart()
                    link.forget()
            except Exception as error:  # raised where the trainer waits
                with self._state:
                    self._error = self._error or error
            finally:
                with self._state:
                    self._busy -= 1
                    self._state.notify_all()

    def _next(self) -> tuple[PartTicket, Target] | None:
        """The next part with the newest weights; None: the run is over."""
        began = time.perf_counter()
        with self._state:
            while True:
                if self._closed or self._error is not None:
                    return None
                ticket = None if self._paused else self.ledger.start()
                if ticket is not None:
                    break
                self._state.wait()
            self._busy += 1
            self.samplers.waited += time.perf_counter() - began
            return ticket, self._target

    def _sampled(self, link: Link, ticket: PartTicket, target: Target) -> bool:
        """Sample the part; False: the sampler died."""
        try:
            fresh = link.sync(target)
            found = self._work(ticket.batch, ticket.part, self._sampling(link, ticket, target), fresh)
        except (SamplerLost, Outdated) as error:
            lost = isinstance(error, SamplerLost)
            with self._state:
                self.restarts += lost
                self.ledger.reopen(ticket)
                self._state.notify_all()
            return not lost
        with self._state:
            self.ledger.finish(ticket, found)
        return True

    def _sampling(self, link: Link, ticket: PartTicket, target: Target) -> Sample:
        restart = self.partial == "restart"
        if self.partial == "finish" or (restart and ticket.attempt >= RESTARTS):
            return link.sampler.sample
        return PartialSampling(link, target, lambda: self._target, restart)

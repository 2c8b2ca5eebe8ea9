"""The schedule of an asynchronous run: which batches are sampled ahead of the trainer, and which one it trains next.

A batch is a number; its prompts and seeds follow from it. It is sampled in parts, each by one sampler under one version
of the weights:

    start → (finish | reopen → start …) → take → done

For every order of these calls: a batch is taken once, and none is left out; no part that is taken is older than
``staleness`` versions. Samplers wait where another batch could become too old, and the trainer waits for a batch that
the next update would make too old, so that nothing is sampled in vain. Nothing here knows threads or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class PartTicket:
    """One part of a batch that a sampler samples with the weights of ``version``; ``attempt`` counts from 0."""

    batch: int
    part: int
    attempt: int
    version: int


@dataclass(frozen=True)
class TakenBatch(Generic[T]):
    """A batch for the trainer: for each part its ticket and what was sampled."""

    batch: int
    parts: tuple[tuple[PartTicket, T], ...]

    @property
    def oldest(self) -> int:
        """The oldest version among the parts."""
        return min(ticket.version for ticket, _ in self.parts)


class RolloutLedger(Generic[T]):
    """``parts``: of each batch. ``updates``: versions that training one batch adds at most. ``version``: of the newest
    weights that samplers can have."""

    def __init__(self, staleness: int, updates: int = 1, parts: int = 1, version: int = 0) -> None:
        assert staleness >= 0 and updates >= 1 and parts >= 1
        self.staleness, self.updates, self.parts, self.version = staleness, updates, parts, version
        self.next = 0
        self.training: int | None = None
        self.again = 0  # parts that were sampled more than once
        self._waiting: list[tuple[int, int]] = []  # parts of batches in flight that no sampler has
        self._running: dict[tuple[int, int], PartTicket] = {}
        self._finished: dict[int, dict[int, tuple[PartTicket, T]]] = {}  # by batch in flight
        self._attempts: dict[tuple[int, int], int] = {}

    def start(self) -> PartTicket | None:
        """The next part for a sampler that has the newest weights; None where it has to wait."""
        if not self._waiting:
            ahead = len(self._finished) + (self.training is not None)
            if ahead * self.updates > self.staleness:
                return None
            self._admit(self.next)
            self.next += 1
        place = self._waiting.pop(0)
        ticket = PartTicket(*place, self._attempts.get(place, 0), self.version)
        self._running[place] = ticket
        return ticket

    def finish(self, ticket: PartTicket, found: T) -> bool:
        """Keep what was sampled. False: the ticket is no longer valid (its sampler was given up), so it is dropped."""
        place = (ticket.batch, ticket.part)
        if self._running.get(place) != ticket:
            return False
        del self._running[place]
        self._finished[ticket.batch][ticket.part] = (ticket, found)
        return True

    def reopen(self, ticket: PartTicket) -> None:
        """The sampler was lost: another one samples the part."""
        place = (ticket.batch, ticket.part)
        if self._running.get(place) == ticket:
            del self._running[place]
            self._again(place)

    def take(self) -> TakenBatch[T] | None:
        """The batch to train next, the one with the oldest weights first; None where none is ready."""
        assert self.training is None, "done comes first"
        self._drop_old()
        ready = [
            TakenBatch(batch, tuple(parts[i] for i in range(self.parts)))
            for batch, parts in self._finished.items()
            if len(parts) == self.parts
        ]
        if not ready:
            return None
        first = min(ready, key=lambda taken: (taken.oldest, taken.batch))
        after = self.version + self.updates
        for batch in self._finished:
            oldest = self._oldest(batch)
            if batch != first.batch and oldest is not None and after - oldest > self.staleness:
                return None  # it is not ready, and the update would make it too old
        del self._finished[first.batch]
        for part in range(self.parts):
            self._attempts.pop((first.batch, part), None)
        self.training = first.batch
        return first

    def done(self, version: int) -> None:
        """The batch is trained, and samplers can have the weights of ``version``."""
        assert version >= self.version
        self.training, self.version = None, version

    @property
    def ready(self) -> int:
        """Batches that wait for the trainer."""
        return sum(len(parts) == self.parts for parts in self._finished.values())

    def state(self) -> dict[str, Any]:
        """The batches that were started and not taken, and the first that was not started. A checkpoint is written
        after a step, so a batch that was taken is trained."""
        return {"next": self.next, "open": sorted(self._finished)}

    def restore(self, state: Mapping[str, Any], version: int) -> None:
        """Continue from a checkpoint: what was started and not trained is sampled again."""
        self.next, self.version = int(state["next"]), version
        for batch in state["open"]:
            self._admit(int(batch))

    def _admit(self, batch: int) -> None:
        self._finished[batch] = {}
        self._waiting += [(batch, part) for part in range(self.parts)]

    def _again(self, place: tuple[int, int]) -> None:
        self._attempts[place] = self._attempts.get(place, 0) + 1
        self.again += 1
        self._waiting.insert(0, place)

    def _oldest(self, batch: int) -> int | None:
        tickets = [ticket for ticket, _ in self._finished[batch].values()]
        tickets += [ticket for (b, _), ticket in self._running.items() if b == batch]
        return min((ticket.version for ticket in tickets), default=None)

    def _drop_old(self) -> None:
        """Parts that are too old now are sampled again."""
        for batch, parts in self._finished.items():
            for part, (ticket, _) in list(parts.items()):
                if self.version - ticket.version > self.staleness:
                    del parts[part]
                    self._again((batch, part))

"""Scheduling of torch work: one unit at a time, fair by time used, chat first.

    v_k ← v_k + seconds / share_k            after every unit of work of kind k
    next = the waiting kind with the least v_k;   a kind that arrives starts at the present v (no credit for idle time)
    within a kind: round-robin, a thread goes to the end after each unit

That is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): with chat and learning both busy, learning gets
share_learn / (share_learn + share_chat) of the time, and chat waits at most for one unit.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["chat", "load", "tinker", "learn"]
SHARES: Mapping[Kind, float] = {"chat": 4.0, "load": 4.0, "tinker": 2.0, "learn": 1.0}
ORDER: tuple[Kind, ...] = ("chat", "load", "tinker", "learn")
"""The order among equals."""


@dataclass(eq=False)
class Ticket:
    """A place in the queue, then the turn itself."""

    kind: Kind
    number: int
    since: float = 0.0


class Turns:
    """Grants the turn to one thread at a time. A holder calls ``yield_turn`` between units of work.
    Private methods are called with ``_changed`` held."""

    def __init__(self, shares: Mapping[Kind, float] = SHARES, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shares, self._clock = shares, clock
        self._changed = threading.Condition()
        self._holder: Ticket | None = None
        self._waiting: list[Ticket] = []
        self._used: dict[Kind, float] = dict.fromkeys(ORDER, 0.0)
        self._now = 0.0  # the virtual time: v of the kind that was served last
        self._numbers = itertools.count()
        self._fence: tuple[Ticket, frozenset[Kind]] | None = None

    def acquire(self, kind: Kind) -> Ticket:
        ticket = Ticket(kind, next(self._numbers))
        with self._changed:
            if not any(t.kind == kind for t in self._waiting) and (self._holder is None or self._holder.kind != kind):
                self._used[kind] = max(self._used[kind], self._now)
            self._waiting.append(ticket)
            self._grant()
            self._changed.wait_for(lambda: self._holder is ticket)
        return ticket

    def release(self, ticket: Ticket) -> None:
        with self._changed:
            assert self._holder is ticket, "only the holder can release its turn"
            self._charge(ticket)
            self._holder = None
            self._grant()

    def yield_turn(
        self,
        ticket: Ticket,
        to: Collection[Kind] = ORDER,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> bool:
        """Between two units of work: let threads with a smaller v go first; True if one did. Until the holder is back
        only kinds in ``to`` are served. ``before`` runs when the turn is about to be handed over, ``after`` when it is
        back."""
        with self._changed:
            assert self._holder is ticket, "only the holder can yield its turn"
            self._charge(ticket)
            # after the others of its kind, so that a long holder does not starve them
            ticket.number = next(self._numbers)
            others = [t for t in self._allowed() if t.kind in to]
            if not others or min([*others, ticket], key=self._rank) is ticket:
                self._now = self._used[ticket.kind]  # a new unit begins here
                return False
            before()
            fenced = self._fence is None and set(to) != set(ORDER)
            if fenced:
                self._fence = (ticket, frozenset(to))
            self._waiting.append(ticket)
            self._holder = None
            self._grant()
            self._changed.wait_for(lambda: self._holder is ticket)
            if fenced:
                self._fence = None
            after()
            return True

    def waiting(self) -> dict[Kind, int]:
        with self._changed:
            return {kind: sum(t.kind == kind for t in self._waiting) for kind in ORDER}

    def _rank(self, ticket: Ticket) -> tuple[float, int, int]:
        return (self._used[ticket.kind], ORDER.index(ticket.kind), ticket.number)

    def _charge(self, ticket: Ticket) -> None:
        now = self._clock()
        self._used[ticket.kind] += (now - ticket.since) / self._shares[ticket.kind]
        ticket.since = now

    def _allowed(self) -> list[Ticket]:
        """The tickets that may be served: during a restricted yield, its owner and the kinds that it named."""
        if self._fence is None:
            return self._waiting
        owner, kinds = self._fence
        return [t for t in self._waiting if t is owner or t.kind in kinds]

    def _grant(self) -> None:
        if self._holder is not None:
            return
        allowed = self._allowed()
        if not allowed:
            return
        chosen = min(allowed, key=self._rank)
        self._waiting.remove(chosen)
        self._holder, chosen.since = chosen, self._clock()
        self._now = self._used[chosen.kind]
        self._changed.notify_all()

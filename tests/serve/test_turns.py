"""Turns: one at a time, fair by time used, chat first; a clock that is moved by hand makes it exact."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.serve.adapter_cache import AdapterCache
from earnest.serve.state import State
from earnest.serve.turns import ORDER, SHARES, Kind, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(threading.Thread):
    """Holds the turn for ``units`` units of work of ``cost`` seconds, yielding between them."""

    def __init__(
        self, turns: Turns, clock: Clock, kind: Kind, units: int, cost: float, log: list[Kind], to=ORDER
    ) -> None:
        super().__init__(daemon=True)
        self.turns, self.clock, self.kind, self.units, self.cost, self.log, self.to = (
            turns,
            clock,
            kind,
            units,
            cost,
            log,
            to,
        )
        self.waits = threading.Event()

    def run(self) -> None:
        self.waits.set()
        ticket = self.turns.acquire(self.kind)
        for _ in range(self.units):
            self.log.append(self.kind)
            self.clock.now += self.cost
            self.turns.yield_turn(ticket, self.to)
        self.turns.release(ticket)


def _run(*work: tuple[Kind, int, float]) -> list[Kind]:
    """All wait while a first holder works; then they are let loose. Returns who worked, unit by unit."""
    clock, log = Clock(), []
    turns = Turns(clock=clock)
    first = turns.acquire("load")
    workers = [Worker(turns, clock, kind, units, cost, log) for kind, units, cost in work]
    for worker in workers:
        worker.start()
    while sum(turns.waiting().values()) < len(workers):
        pass
    turns.release(first)
    for worker in workers:
        worker.join()
    return log


def test_by_hand() -> None:
    """Units of 1 s; v_chat grows by 1/4 a unit, v_learn by 1. Chat leads where they are equal."""
    assert _run(("learn", 3, 1.0), ("chat", 8, 1.0)) == [
        *["chat", "learn", "chat", "chat", "chat", "chat", "learn", "chat", "chat", "chat", "learn"],
    ]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(ORDER), st.sampled_from([0.5, 1.0, 2.0])),
        min_size=2,
        max_size=4,
        unique_by=lambda x: x[0],
    )
)
def test_time_goes_by_shares(kinds: list[tuple[Kind, float]]) -> None:
    """While all are busy no kind is ahead of its share by more than the longest units."""
    log = _run(*((kind, int(40 * SHARES[kind] / cost / 4), cost) for kind, cost in kinds))
    costs = dict(kinds)
    used: Counter[Kind] = Counter()
    longest = max(cost / SHARES[kind] for kind, cost in kinds)
    left = Counter(log)
    for kind in log:
        if min(left[k] for k in costs) == 0:
            break
        used[kind] += costs[kind]
        left[kind] -= 1
        normal = [used[k] / SHARES[k] for k in costs]
        assert max(normal) - min(normal) <= 2 * longest + 1e-9
    assert len(log) == sum(int(40 * SHARES[k] / c / 4) for k, c in kinds)


def test_idle_time_gives_no_credit() -> None:
    """Chat that was silent for an hour does not shut learning out for an hour."""
    clock, log = Clock(), []
    turns = Turns(clock=clock)
    ticket = turns.acquire("learn")
    for _ in range(3600):
        clock.now += 1.0
        turns.yield_turn(ticket)
    chat = Worker(turns, clock, "chat", 40, 1.0, log)
    chat.start()
    while not turns.waiting()["chat"]:
        pass
    before = 0
    while chat.is_alive() and len(log) < 40:
        turns.yield_turn(ticket)
        before += len(log) < 40
        clock.now += 1.0
    turns.release(ticket)
    chat.join()
    assert before >= 8  # a fifth of the time


def test_a_restricted_yield_keeps_other_kinds_out() -> None:
    """While a learner yields to chat only, a Tinker step waits, also when chat hands its turn on."""
    clock, log = Clock(), []
    turns = Turns(clock=clock)
    ticket = turns.acquire("learn")
    clock.now += 100.0
    workers = [Worker(turns, clock, "chat", 3, 1.0, log), Worker(turns, clock, "tinker", 3, 1.0, log)]
    for worker in workers:
        worker.start()
    while sum(turns.waiting().values()) < 2:
        pass
    assert turns.yield_turn(ticket, to=("chat",))
    assert "tinker" not in log and "chat" in log
    turns.release(ticket)
    for worker in workers:
        worker.join()
    assert log.count("tinker") == 3


def test_a_busy_chat_does_not_keep_the_owner_of_a_restricted_yield_out() -> None:
    """A learner that lets only chat in gets its fifth of the time while chat never pauses."""
    clock, log = Clock(), []
    turns = Turns(clock=clock)
    ticket = turns.acquire("learn")
    chat = Worker(turns, clock, "chat", 200, 1.0, log)
    chat.start()
    while not turns.waiting()["chat"]:
        pass
    units = 0
    while len(log) < 100:
        clock.now += 1.0
        units += 1
        turns.yield_turn(ticket, to=("chat",))
    turns.release(ticket)
    chat.join(10)
    assert len(log) == 200 and 20 <= units <= 30


def test_one_kind_goes_round() -> None:
    """Three of one kind take a unit each in turn: a chat that never ends keeps no score waiting."""
    clock, names = Clock(), []
    turns = Turns(clock=clock)
    first = turns.acquire("load")
    threads = []

    def work(name: str, units: int) -> None:
        ticket = turns.acquire("chat")
        for unit in range(units):
            names.append(name)
            clock.now += 1.0
            if unit < units - 1:
                turns.yield_turn(ticket)
        turns.release(ticket)

    for count, (name, units) in enumerate((("a", 6), ("b", 2), ("c", 1)), 1):
        threads.append(threading.Thread(target=work, args=(name, units), daemon=True))
        threads[-1].start()
        while turns.waiting()["chat"] < count:
            pass
    turns.release(first)
    for thread in threads:
        thread.join(10)
    assert "".join(names) == "abcabaaaa"


def test_hooks_run_before_and_after_a_yield() -> None:
    clock, log = Clock(), []
    turns = Turns(clock=clock)
    ticket = turns.acquire("learn")
    clock.now += 1.0
    assert not turns.yield_turn(ticket, before=lambda: log.append("b"), after=lambda: log.append("a")) and log == []
    worker = Worker(turns, clock, "chat", 1, 1.0, log)
    worker.start()
    while not turns.waiting()["chat"]:
        pass
    assert turns.yield_turn(ticket, before=lambda: log.append("before"), after=lambda: log.append("after"))
    assert log == ["before", "chat", "after"]
    turns.release(ticket)
    worker.join()


def test_only_the_holder() -> None:
    turns = Turns()
    ticket = turns.acquire("chat")
    turns.release(ticket)
    with pytest.raises(AssertionError, match="holder"):
        turns.release(ticket)


def test_adapters_are_marked_as_removed_under_the_lock() -> None:
    """Another thread that begins to use an adapter meanwhile would change the table that is walked through."""
    held: list[bool] = []
    detached: list[str] = []
    host: Any = SimpleNamespace(turn=lambda _: nullcontext(), detach=detached.append)
    cache = AdapterCache(host, 4)
    for key in "ab":
        cache.acquire(key, lambda key: SimpleNamespace(name=key, freeze=lambda: None))  # type: ignore[arg-type, return-value]
        cache.release(key)
    cache.remove(lambda key: held.append(cache._lock.locked()) or key == "a")  # type: ignore[func-returns-value]
    assert held == [True, True] and detached == ["a"] and not cache._lock.locked()


def test_the_learner_ends_before_the_policy_it_works_on() -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name), release=lambda: closed.append(name))

    names = ("bus", "changes", "host", "learner", "store", "_lock")
    State.close(SimpleNamespace(**{name: part(name) for name in names}))  # type: ignore[arg-type]
    assert closed.index("learner") < closed.index("host") < closed.index("store") < closed.index("_lock")

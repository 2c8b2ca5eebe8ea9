"""Versions in memory: loaded when first asked for, kept while in use, gone when others need the room.

A request leases the version that is live when it arrives and keeps it to its last token; so the switch to a new
version is atomic, and an answer comes from exactly one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from earnest.serve.errors import NoModel
from earnest.serve.host import Host
from earnest.serve.store import PUSHED, AdapterRow, Store

if TYPE_CHECKING:
    from earnest.adapters import Adapter


@dataclass(eq=False)
class _Held:
    adapter: Adapter
    refs: int = 0
    used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Lease:
    """``row`` None is the base; so is version 0 of any adapter."""

    row: AdapterRow | None
    version: int
    adapter: Adapter | None

    @property
    def model(self) -> str:
        return "base" if self.row is None else self.row.name


def split(model: str) -> tuple[str, int | None]:
    """'team/assistant@3' → ('team/assistant', 3)."""
    name, at, number = model.partition("@")
    if not at:
        return name, None
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise NoModel(f"{model[:160]!r} names no version; write NAME or NAME@NUMBER, such as assistant@3.", "model")
    return name, int(number)


class Shelf:
    """The versions of the store's adapters that are on the host."""

    def __init__(self, host: Host, store: Store, most: int) -> None:
        self.host, self.store, self.most = host, store, most
        self._held: dict[tuple[int, int], _Held] = {}
        self._lock = threading.RLock()

    def folder(self, adapter: int, number: int) -> Path:
        """Where a version is kept: numbers only, no name ever becomes a path."""
        return self.store.folder / "adapters" / str(adapter) / str(number)

    def resolve(self, model: str) -> tuple[AdapterRow | None, int]:
        """Which version a model's name means now."""
        name, number = split(model)
        if name in ("base", self.host.settings.model):
            if number:
                raise NoModel(f"{name} has no versions but 0.", "model")
            return None, 0
        row = self.store.adapter(name)
        if number is not None and number > 0:
            self.store.version(row, number)
        if row.origin == PUSHED and not (row.live if number is None else number):
            raise NoModel(f"{name} was pushed and its weights are not live; load it again, or ask for base.", "model")
        return row, row.live if number is None else number

    @contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """The version, loaded and kept inside the block."""
        while True:
            row, number = self.resolve(model)
            if row is None or number == 0:
                yield Lease(row, number, None)
                return
            try:
                held = self._take(row.id, number)
                break
            except Exception:  # of one that was replaced or deleted since the name was looked up: look again
                again, other = self.resolve(model)
                if again is not None and (again.id, other) == (row.id, number):
                    raise
        try:
            yield Lease(row, number, held.adapter)
        finally:
            with self._lock:
                held.refs -= 1
                held.used = time.monotonic()

    @contextmanager
    def checked(self, adapter: int, number: int) -> Iterator[Adapter]:
        """A version that the store may not know yet, in use inside the block; it stays, for whoever asks next."""
        held = self._take(adapter, number)
        try:
            yield held.adapter
        finally:
            with self._lock:
                held.refs -= 1

    def forget(self, adapter: int, number: int | None = None) -> None:
        """Take deleted versions off, those in use when their last answer is done (by whoever makes room next)."""
        with self.host.turn("load"), self._lock:  # in this order everywhere
            for key in list(self._held):
                if key[0] == adapter and number in (None, key[1]):
                    self._held[key].used = 0.0
            self._make_room(len(self._held))

    def resident(self) -> list[tuple[int, int]]:
        return list(self._held)

    def _take(self, adapter: int, number: int) -> _Held:
        key = (adapter, number)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                held.refs += 1
                return held
        # Without the lock: loading waits for a turn, and whoever holds that may be waiting for the lock.
        with self.host.turn("load"), self._lock:
            held = self._held.get(key)
            if held is None:
                self._make_room(self.most - 1)
                mounted = self.host.mount(f"{adapter}@{number}", self.folder(adapter, number) / "adapter")
                mounted.freeze()
                held = self._held[key] = _Held(mounted)
            held.refs += 1
            return held

    def _make_room(self, most: int) -> None:
        """Detach versions that nobody uses, the one unused longest first; the deleted in any case."""
        idle = sorted((k for k, h in self._held.items() if h.refs == 0), key=lambda k: self._held[k].used)
        for key in idle:
            if len(self._held) <= most and self._held[key].used > 0:
                break
            del self._held[key]
            self.host.detach(f"{key[0]}@{key[1]}")

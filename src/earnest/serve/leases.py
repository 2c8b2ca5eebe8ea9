"""Leases: a request uses the version that is live when it arrives, from its first token to its last.

So the switch to a new version is atomic, and an answer comes from exactly one version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earnest.serve.errors import Loading, NoModel, damaged
from earnest.serve.host import Host
from earnest.serve.names import PUSHED_LAST
from earnest.serve.rows import AdapterRow
from earnest.serve.store import PUSHED, ServerStore

if TYPE_CHECKING:
    from earnest.adapters import Adapter

log = logging.getLogger("earnest.serve")


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


class Leases:
    """Finds the version that a model's name means, and keeps it attached while a request uses it."""

    def __init__(self, host: Host, store: ServerStore) -> None:
        self.host, self.store = host, store

    def resolve(self, model: str) -> tuple[AdapterRow | None, int]:
        """(adapter, number) of the version that a model's name means now; None is the base."""
        name, number = split(model)
        if name in ("base", self.host.settings.model):
            if number:
                raise NoModel(f"{name} has no versions but 0.", "model")
            return None, 0
        row = self._pushed_last() if name == PUSHED_LAST else self.store.adapter(name)
        if number is not None and number > 0:
            self.store.version(row, number)
        if row.origin == PUSHED and not (row.live if number is None else number):
            raise NoModel(f"{name} was pushed and its weights are not live; load it again, or use base.", "model")
        return row, row.live if number is None else number

    def _pushed_last(self) -> AdapterRow:
        pushed = [row for row in self.store.adapters() if row.origin == PUSHED and row.live]
        if not pushed:
            raise Loading("no adapter was pushed here so far; try again after the first push, or use base.", "model")
        return pushed[-1]

    @contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """The version that ``model`` means, attached inside the block."""
        while True:
            row, number = self.resolve(model)
            if row is None or number == 0:
                yield Lease(row, number, None)
                return
            try:
                adapter = self._acquire(row.id, number)
                break
            except Exception as error:  # it may have been replaced or deleted since the name was resolved: try again
                again, other = self.resolve(model)
                if again is not None and (again.id, other) == (row.id, number):
                    from earnest.adapters.errors import AdapterError

                    if isinstance(error, (AdapterError, FileNotFoundError)):
                        log.error("version %s of %s cannot be loaded: %s", number, row.name, error)
                        raise damaged(row.name, number) from None
                    raise
        try:
            yield Lease(row, number, adapter)
        finally:
            self.host.cache.release(_key(row.id, number))

    @contextmanager
    def checked(self, adapter: int, number: int) -> Iterator[Adapter]:
        """A version that the store may not list yet, attached inside the block; it stays in the cache."""
        attached = self._acquire(adapter, number)
        try:
            yield attached
        finally:
            self.host.cache.release(_key(adapter, number))

    def forget(self, adapter: int, number: int | None = None) -> None:
        """Detach deleted versions (None: all of the adapter's), those in use after their last answer."""
        prefix = f"{adapter}@"
        self.host.cache.remove(lambda key: key.startswith(prefix) if number is None else key == f"{prefix}{number}")

    def _acquire(self, adapter: int, number: int) -> Adapter:
        folder = self.store.version_folder(adapter, number) / "adapter"
        return self.host.cache.acquire(_key(adapter, number), lambda name: self.host.mount(name, folder))


def _key(adapter: int, number: int) -> str:
    return f"{adapter}@{number}"

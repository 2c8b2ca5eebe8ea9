"""Weights to sample from: the base, a checkpoint, or what a model's weights were when somebody asked.

A sampler's weights never change. Its adapter is put on the policy when it is first sampled from, and leaves again when
too many are there (never while one of its requests is under way).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import TYPE_CHECKING

from torch import Tensor

from earnest.serve.tinker.errors import NotThere

if TYPE_CHECKING:
    from earnest.adapters import Adapter, Variant
    from earnest.serve.host import Host

ATTACHED = 8
SNAPSHOTS = 64
"""Copies in memory for one session; ``RemoteEMA`` counts on them."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a model's adapter in memory."""

    variant: Variant
    targets: tuple[str, ...]
    tensors: dict[str, Tensor]


Source = Folder | Snapshot | None
"""A folder with a saved adapter, a copy in memory, or the base."""


class Shelf:
    """Adapters of samplers on the policy, by key; the least recently used leaves first."""

    def __init__(self, host: Host, most: int = ATTACHED) -> None:
        self.host, self.most = host, most
        self._lock = threading.RLock()
        # A lock of its own: the decoder's thread lets go while another thread holds ``_lock`` and waits for a turn.
        self._counting = threading.Lock()
        self._shelf: OrderedDict[str, Adapter] = OrderedDict()
        self._users: dict[str, int] = {}
        self._names = 0

    def hold(self, key: str, source: Source) -> Adapter | None:
        """The adapter of a sampler, on the policy until ``let_go``."""
        if source is None:
            return None
        with self._lock:
            if key not in self._shelf:
                self._names += 1
                name = f"tinker sampler {self._names}"
                if isinstance(source, Snapshot):
                    adapter = self.host.attach(name, source.variant, targets=list(source.targets))
                    adapter.load_state_dict(source.tensors)
                else:
                    adapter = self.host.mount(name, source)
                self._shelf[key] = adapter
            self._shelf.move_to_end(key)
            with self._counting:
                self._users[key] = self._users.get(key, 0) + 1
            return self._shelf[key]

    def let_go(self, key: str, source: Source) -> None:
        if source is not None:
            with self._counting:
                self._users[key] -= 1

    def tidy(self) -> None:
        """Take off what nobody uses, beyond the limit. Not to be called inside a turn of the decoder's thread."""
        with self._lock:
            for key in list(self._shelf):
                if len(self._shelf) <= self.most:
                    return
                if not self._users.get(key):
                    self.host.detach(self._shelf.pop(key).name)
                    self._users.pop(key, None)


class Samplers:
    """Sampling sessions by id (``<session>:sample:<number>``).

    A session keeps the ``SNAPSHOTS`` copies in memory that it used last, whatever others do, and none once it ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Source, str | None]] = {}
        self._copies: dict[str, OrderedDict[str, None]] = {}  # by session, the least recently used first
        self._clones: dict[str, int] = {}

    def add(self, sampler: str, key: str, source: Source, path: str | None) -> None:
        with self._lock:
            self._known[sampler] = (key, source, path)
            if isinstance(source, Snapshot):
                copies = self._copies.setdefault(_session(sampler), OrderedDict())
                copies[sampler] = None
                copies.move_to_end(sampler)
                while len(copies) > SNAPSHOTS:
                    self._forget(copies.popitem(last=False)[0])

    def get(self, sampler: str) -> tuple[str, Source, str | None]:
        """(key of its weights, the weights, its path where it has one). To ask for it is to use it."""
        with self._lock:
            found = self._known.get(sampler)
            if found is not None:
                copies = self._copies.get(_session(sampler))
                if copies is not None and sampler in copies:
                    copies.move_to_end(sampler)
                return found
        raise NotThere(
            f"there is no sampler {sampler!r}: the server was restarted, its session ended, or the session has used "
            f"{SNAPSHOTS} others since. Save the weights under a name to keep them."
        )

    def end(self, session: str) -> None:
        """Forget the copies in memory of a session that is over."""
        with self._lock:
            for sampler in self._copies.pop(session, {}):
                self._forget(sampler)

    def _forget(self, sampler: str) -> None:
        del self._known[sampler]
        self._clones.pop(sampler, None)

    def join(self, sampler: str) -> int:
        """A number for one more client of this sampler; the first one is 0."""
        self.get(sampler)
        with self._lock:
            self._clones[sampler] = self._clones.get(sampler, 0) + 1
            return self._clones[sampler]

    def __contains__(self, sampler: str) -> bool:
        return sampler in self._known


def _session(sampler: str) -> str:
    return sampler.partition(":")[0]

"""Weights to sample from: the base, a checkpoint, or a copy of a model's weights in memory.

A sampler's weights never change. Its adapter comes from the host's cache, which keeps it attached while one of its
requests runs.
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

SNAPSHOTS = 64
"""Copies in memory for one session; ``RemoteEMA`` counts on them."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a model's adapter in memory."""

    variant: Variant
    targets: tuple[str, ...]
    tensors: dict[str, Tensor]

    def attach(self, host: Host, name: str) -> Adapter:
        adapter = host.attach(name, self.variant, targets=list(self.targets))
        adapter.load_state_dict(self.tensors)
        return adapter


WeightSource = Folder | Snapshot | None
"""A folder with a saved adapter, a copy in memory, or the base."""


def attach(host: Host, key: str, source: Folder | Snapshot) -> Adapter:
    """The adapter of these weights, in use until ``host.cache.release(key)``."""
    if isinstance(source, Snapshot):
        return host.cache.acquire(key, lambda name: source.attach(host, name))
    return host.cache.acquire(key, lambda name: host.mount(name, source))


class Samplers:
    """Sampling sessions by id (``<session>:sample:<number>``). Each session keeps the last ``SNAPSHOTS`` copies in
    memory that it used; when it ends, it keeps none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, WeightSource, str | None]] = {}
        self._copies: dict[str, OrderedDict[str, None]] = {}  # by session, the least recently used first
        self._clones: dict[str, int] = {}

    def add(self, sampler: str, key: str, source: WeightSource, path: str | None) -> None:
        with self._lock:
            self._known[sampler] = (key, source, path)
            if isinstance(source, Snapshot):
                copies = self._copies.setdefault(_session(sampler), OrderedDict())
                copies[sampler] = None
                copies.move_to_end(sampler)
                while len(copies) > SNAPSHOTS:
                    self._forget(copies.popitem(last=False)[0])

    def get(self, sampler: str) -> tuple[str, WeightSource, str | None]:
        """(key of its weights, the weights, its path or None). Counts as a use of the sampler."""
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
        """Forget the copies in memory of a session that ended."""
        with self._lock:
            for sampler in self._copies.pop(session, {}):
                self._forget(sampler)

    def _forget(self, sampler: str) -> None:
        del self._known[sampler]
        self._clones.pop(sampler, None)

    def join(self, sampler: str) -> int:
        """A number for one more client of this sampler; the client that made it has 0."""
        self.get(sampler)
        with self._lock:
            self._clones[sampler] = self._clones.get(sampler, 0) + 1
            return self._clones[sampler]

    def __contains__(self, sampler: str) -> bool:
        return sampler in self._known


def _session(sampler: str) -> str:
    return sampler.partition(":")[0]

"""Adapters that are attached to the policy for sampling: loaded at first use, detached when others need the room.

The same cache holds the versions that answer chats and the weights that Tinker clients sample from. Weights in it
never change. An adapter in use stays; of the others the least recently used one is detached first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.serve.host import Host


@dataclass(eq=False)
class _Entry:
    adapter: Adapter
    users: int = 1
    removed: bool = False


class AdapterCache:
    """Attached adapters by key. ``capacity`` bounds their number, except while more than that are in use."""

    def __init__(self, host: Host, capacity: int) -> None:
        self.host, self.capacity = host, capacity
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        # Whoever needs both takes the turn first: a thread that waits for a turn never holds this lock.
        self._lock = threading.Lock()

    def acquire(self, key: str, load: Callable[[str], Adapter]) -> Adapter:
        """The adapter of ``key``, in use until ``release``. ``load(key)`` attaches it under that name."""
        if (found := self._use(key)) is not None:
            return found
        with self.host.turn("load"):
            if (found := self._use(key)) is not None:  # another thread may have loaded it meanwhile
                return found
            self._evict(self.capacity - 1)
            adapter = load(key)
            adapter.freeze()
            with self._lock:
                self._entries[key] = _Entry(adapter)
            return adapter

    def release(self, key: str) -> None:
        """End one use of ``key``. It takes no turn, so any thread may call it."""
        with self._lock:
            self._entries[key].users -= 1
            self._entries.move_to_end(key)

    def remove(self, matches: Callable[[str], bool]) -> None:
        """Detach the adapters with matching keys; one in use is detached when room is made after its last use."""
        with self.host.turn("load"):
            with self._lock:
                for key, entry in self._entries.items():
                    entry.removed |= matches(key)
            self._evict(self.capacity)

    def _use(self, key: str) -> Adapter | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.users += 1
            return entry.adapter

    def _evict(self, most: int) -> None:
        """Detach unused adapters until at most ``most`` are left, and every removed one. Inside a turn."""
        with self._lock:
            idle = [key for key, entry in self._entries.items() if not entry.users]
            excess = max(0, len(self._entries) - most)
            leaving = [key for key in idle if self._entries[key].removed]
            leaving += [key for key in idle if key not in leaving][: max(0, excess - len(leaving))]
            for key in leaving:
                del self._entries[key]
        for key in leaving:
            self.host.detach(key)

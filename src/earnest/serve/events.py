"""Server-sent events for clients that follow the server.

    event: version
    id: 17
    data: {"adapter": "team/assistant", "number": 3, "status": "promoted", …}

A reader that reconnects with ``Last-Event-ID`` gets the events that it missed, if the ring buffer still has them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

KEPT = 1000
HEARTBEAT = 15.0


@dataclass(frozen=True)
class Event:
    """``adapter`` decides which keys may see it; None: all."""

    id: int
    kind: str
    adapter: str | None
    data: Mapping[str, Any]

    def text(self, hidden: Collection[str] = ()) -> str:
        """The event as it is sent, without the ``hidden`` parts of its data."""
        data = {k: v for k, v in self.data.items() if k not in hidden}
        return f"event: {self.kind}\nid: {self.id}\ndata: {json.dumps(data)}\n\n"


class Bus:
    """Events are published from any thread and read in the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ring: deque[Event] = deque(maxlen=KEPT)
        self._readers: dict[asyncio.Queue[Event | None], asyncio.AbstractEventLoop] = {}
        self._last = 0
        self._closed = False

    def publish(self, kind: str, about: str | None = None, /, **data: Any) -> None:
        with self._lock:
            self._last += 1
            event = Event(self._last, kind, about, {"time": time.time(), **data, "adapter": about})
            self._ring.append(event)
            for queue, loop in self._readers.items():
                loop.call_soon_threadsafe(queue.put_nowait, event)

    def hint(self, kind: str, about: str | None = None, /) -> None:
        """Publish an event without data to the present readers; it is not kept for later ones."""
        with self._lock:
            event = Event(self._last, kind, about, {"time": time.time(), "adapter": about})
            for queue, loop in self._readers.items():
                loop.call_soon_threadsafe(queue.put_nowait, event)

    @property
    def watched(self) -> bool:
        return bool(self._readers)

    async def listen(
        self, may: Callable[[Event], bool], after: int | None, hidden: Collection[str] = ()
    ) -> AsyncGenerator[str]:
        """The lines for one reader, until it disconnects or the server shuts down."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        with self._lock:
            missed = [e for e in self._ring if after is not None and e.id > after]
            self._readers[queue] = asyncio.get_running_loop()
            if self._closed:
                queue.put_nowait(None)
        try:
            yield "retry: 2000\n\n"
            for event in missed:
                if may(event):
                    yield event.text(hidden)
            while True:
                try:
                    found = await asyncio.wait_for(queue.get(), HEARTBEAT)
                except TimeoutError:
                    yield ": alive\n\n"
                    continue
                if found is None:
                    return
                if may(found):
                    yield found.text(hidden)
        finally:
            with self._lock:
                self._readers.pop(queue, None)

    def close(self) -> None:
        """End every reader's stream, so that a shutdown does not wait for them."""
        with self._lock:
            self._closed = True
            for queue, loop in self._readers.items():
                loop.call_soon_threadsafe(queue.put_nowait, None)

"""uvicorn's HTTP connection with a time limit for a request's headers, which uvicorn does not have."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HTTPProtocol: Any = AutoHTTPProtocol  # httptools' or h11's, whichever is installed


def with_header_limit(seconds: float) -> type[asyncio.Protocol]:
    """A protocol that closes a connection whose next request has no complete headers after ``seconds``."""

    class Limited(HTTPProtocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(seconds, self._close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._busy():
                self._stop()
            elif self._timer is None:  # the first part of the next request
                self._timer = self.loop.call_later(seconds, self._close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _close(self) -> None:
            self._timer = None
            if not self._busy():
                self.transport.close()

    return Limited

"""What every request passes first: the size of its body, and on a server without keys, where it really comes from.

Without keys the server trusts whoever can connect, so a web page in the user's browser must not be able to: requests
need a loopback name in ``Host`` (no DNS rebinding) and, where a browser sends one, an ``Origin`` of this very server.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from earnest.serve.errors import Forbidden, ServeError, TooLarge
from earnest.serve.settings import LOOPBACK_NAMES

TINKER_BODY = 64 << 20
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RequestLimits:
    """ASGI middleware."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        max_body: int,
        loopback_only: bool,
        larger: Mapping[str, int] | None = None,
    ) -> None:
        self.app, self.max_body, self.loopback_only = app, max_body, loopback_only
        self.larger = larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        limit = self._limit(scope["path"])
        try:
            self._check(headers, limit)
        except ServeError as error:
            await refuse(send, error)
            return
        seen, started = 0, False

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _Beyond
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if seen > limit and not started:
                return  # whatever the application makes of a body that breaks off, the answer is below
            started = True
            await send(message)

        with contextlib.suppress(_Beyond):
            await self.app(scope, counted, noted)
        if seen > limit and not started:
            await refuse(send, _too_large(limit))

    def _limit(self, path: str) -> int:
        """The Tinker wire carries whole batches, and sets its own limit below this one; ``larger`` has others."""
        if path in self.larger:
            return self.larger[path]
        return max(self.max_body, TINKER_BODY) if path.startswith("/api/v1/") else self.max_body

    def _check(self, headers: dict[str, str], limit: int) -> None:
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise _too_large(limit)
        if not self.loopback_only:
            return
        if _name(headers.get("host", "")) not in LOOPBACK_NAMES:
            raise Forbidden("this server has no API keys and answers to 127.0.0.1, ::1 and localhost only.")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise Forbidden("this server has no API keys and takes no requests from pages of other origins.")


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body has more than {limit} bytes, which is the limit here; send less at once.")


class _Beyond(Exception):
    """The body grew beyond the limit while it was read."""


def _name(host: str) -> str:
    return host.rsplit("]", 1)[0] + "]" if host.startswith("[") else host.rsplit(":", 1)[0]


async def refuse(send: Send, error: ServeError) -> None:
    """Answer with the error, and close: the rest of the body is not read."""
    content = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send(
        {"type": "http.response.start", "status": error.status, "headers": [*headers, (b"connection", b"close")]}
    )
    await send({"type": "http.response.body", "body": content})

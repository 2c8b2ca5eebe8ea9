"""Checks on every request: size and duration of the body, and on a server without keys also the sender.

Without keys the server trusts every process that can connect, so it must refuse web pages in the user's browser:
requests need a loopback name in ``Host`` (no DNS rebinding) and, where a browser sends one, an ``Origin`` of this
server. An error without a handler becomes a 500 here, and the connection stays usable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from earnest.serve.errors import Forbidden, ServeError, TooLarge, TooSlow, error_response
from earnest.serve.settings import LOOPBACK_NAMES

TINKER_BODY = 64 << 20
SLOWEST = 16384.0  # bytes per second that a body must arrive with, after its first seconds


@dataclass(eq=False)
class RequestLimits:
    """ASGI middleware."""

    app: ASGIApp
    max_body: int
    body_wait: float
    loopback_only: bool
    larger: Mapping[str, int]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        # The Tinker wire carries whole batches.
        most = max(self.max_body, TINKER_BODY) if scope["path"].startswith("/api/v1/") else self.max_body
        limit = self.larger.get(scope["path"], most)
        try:
            self._check(headers, limit)
        except ServeError as error:
            await _refusal(error)(scope, receive, send)
            return
        seen, started, whole = 0, False, False
        refusal: ServeError | None = None
        begun = asyncio.get_running_loop().time()

        async def counted() -> Message:
            nonlocal seen, whole, refusal
            if whole:
                return await receive()
            left = begun + self.body_wait + seen / SLOWEST - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0.0))
            except TimeoutError:
                refusal = TooSlow(
                    f"the body did not arrive within {self.body_wait:g} s; send it faster, or less of it."
                )
                raise _Refused from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > limit:
                refusal = _too_large(limit)
                raise _Refused
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if refusal is not None and not started:
                return  # the application would answer the incomplete body itself; the answer below replaces that
            started = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except _Refused:
            pass
        except Exception as error:
            if started:
                raise
            status, body, more = error_response(error)
            await JSONResponse(body, status, more)(scope, receive, send)
        if refusal is not None and not started:
            await _refusal(refusal)(scope, receive, send)

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


class _Refused(Exception):
    """The body is too large or too slow; found while it was read."""


def _name(host: str) -> str:
    return host.rsplit("]", 1)[0] + "]" if host.startswith("[") else host.rsplit(":", 1)[0]


def _refusal(error: ServeError) -> JSONResponse:
    """The error as an answer that closes the connection: the rest of the body is not read."""
    return JSONResponse(error.body(), error.status, error.headers | {"connection": "close"})

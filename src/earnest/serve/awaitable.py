"""A thread's future as an awaitable. Unlike with ``asyncio.wrap_future``, cancelling the awaitable cancels no work."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def awaitable(future: Future[T]) -> asyncio.Future[T]:
    """Done when ``future`` is, with its result or its error."""
    loop = asyncio.get_running_loop()
    own: asyncio.Future[T] = loop.create_future()

    def copy() -> None:
        if own.done():  # the awaitable was cancelled
            return
        if (error := future.exception()) is not None:
            own.set_exception(error)
        else:
            own.set_result(future.result())

    def done(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(copy)

    future.add_done_callback(done)
    return own

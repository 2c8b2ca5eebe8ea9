"""A thread's future, seen from the event loop. Unlike ``asyncio.wrap_future``, leaving cancels nothing."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def watching(future: Future[T]) -> asyncio.Future[T]:
    """Done when ``future`` is."""
    loop = asyncio.get_running_loop()
    mine: asyncio.Future[T] = loop.create_future()

    def tell() -> None:
        if mine.done():  # nobody waits any more
            return
        if (error := future.exception()) is not None:
            mine.set_exception(error)
        else:
            mine.set_result(future.result())

    def done(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody can wait any more
            loop.call_soon_threadsafe(tell)

    future.add_done_callback(done)
    return mine

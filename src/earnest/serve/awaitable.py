"""A thread's future as an awaitable."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def awaitable(future: Future[T]) -> asyncio.Future[T]:
    """Done when ``future`` is, with its result or its error; cancelling it cancels no work."""
    return asyncio.shield(asyncio.wrap_future(future))

"""Ctrl-C and SIGTERM stop the run after its current step; a second Ctrl-C stops it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Stopper:
    """``requested`` is the number of the signal that was received, or None."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested: int | None = None
        self._say = say
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers in no other thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = number
        self._say("stopping after this step (Ctrl-C again stops at once)")

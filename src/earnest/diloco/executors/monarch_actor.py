"""Monarch's actor around a ``Runner``; importing this imports monarch, which starts its runtime."""

from __future__ import annotations

from monarch.actor import Actor, endpoint

from earnest.diloco.executors.base import gpu_variables
from earnest.diloco.executors.runner import Runner


class Worker(Actor):
    """One ``earnest worker``. Endpoints must not have the names of a mesh's methods, such as ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.runner = Runner()

    @endpoint  # type: ignore[untyped-decorator]
    def begin(self, words: list[str], env: dict[str, str], gpu: bool | None, number: int, ranks: int = 1) -> None:
        """``number``: that of the replica among those on this host, which takes its GPUs in turn."""
        self.runner.start(words, {**gpu_variables(gpu, number, ranks), **env})

    @endpoint  # type: ignore[untyped-decorator]
    def look(self) -> tuple[int, str] | None:
        return self.runner.poll()

    @endpoint  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        self.runner.stop()

"""An endless stream of prompts. Its position is a small JSON state, so that a resumed run gets the same prompts."""

from __future__ import annotations

from typing import Any

from earnest.tasks.base import Prompt, Split, Task, TaskError
from earnest.tasks.environment import Environment
from earnest.tasks.split import check_request

_BLOCK = 256


class PromptStream:
    """Prompts of one split in an order that depends only on the seed: ``next(3) + next(5)`` is ``next(8)``.

    The stream consists of blocks without repetition; each block has its own seed.
    """

    def __init__(self, task: Task | Environment, seed: int, split: Split = "train", position: int = 0) -> None:
        check_request(split, position)
        self.task, self.seed, self.split, self.position = task, seed, split, position
        self._block: tuple[int, list[Prompt]] | None = None

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        check_request(self.split, count)
        out = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return out

    def _at(self, position: int) -> Prompt:
        number, offset = divmod(position, _BLOCK)
        if self._block is None or self._block[0] != number:
            block = self.task.prompts(self.split, _BLOCK, _block_seed(self.seed, number))
            if not block:
                raise TaskError(f"task {self.task.name} has no prompts in split {self.split!r}; it needs at least one.")
            self._block = (number, block)
        block = self._block[1]
        return block[offset % len(block)]

    def state(self) -> dict[str, Any]:
        """The stream's position, task, split and seed, as JSON data."""
        return {"task": self.task.name, "seed": self.seed, "split": self.split, "position": self.position}


def _block_seed(seed: int, number: int) -> int:
    """A seed per (seed, block) by Cantor's pairing: different for every pair."""
    seed = 2 * seed if seed >= 0 else -2 * seed - 1
    return (seed + number) * (seed + number + 1) // 2 + number

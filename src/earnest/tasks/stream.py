"""An endless stream of prompts whose position is a small JSON-able state, so that a resumed run sees the same data."""

from __future__ import annotations

from typing import Any

from earnest.tasks.base import Prompt, Split, Task, TaskError
from earnest.tasks.split import check_request

_BLOCK = 256


class PromptStream:
    """Prompts of one split in an order that the seed alone decides: ``next(3) + next(5)`` is ``next(8)``.

    The stream is a row of blocks without repetition inside, block b drawn with a seed of its own.
    """

    def __init__(self, task: Task, seed: int, split: Split = "train", position: int = 0) -> None:
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
                raise TaskError(f"task {self.task.name} has no prompts in split {self.split!r}.")
            self._block = (number, block)
        block = self._block[1]
        return block[offset % len(block)]

    def state(self) -> dict[str, Any]:
        """The stream's position and what it is a position of, as JSON-able data."""
        return {"task": self.task.name, "seed": self.seed, "split": self.split, "position": self.position}


def _block_seed(seed: int, number: int) -> int:
    """Different for every (seed, block), by Cantor's pairing: streams of near seeds share no block."""
    seed = 2 * seed if seed >= 0 else -2 * seed - 1
    return (seed + number) * (seed + number + 1) // 2 + number

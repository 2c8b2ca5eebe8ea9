"""The split of questions into train and held-out, drawing distinct questions, and an endless stream of them.

The hash of a question's content decides its split. So no seed, order or count brings a held-out question into training.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from earnest.tasks.base import Prompt, Split, Task, TaskError
from earnest.tasks.environment import Environment

HELDOUT_SHARE = 0.2
_BLOCK = 256
_PATIENCE = 20_000
"""Consecutive draws without a new question of the split after which the space counts as used up."""

T = TypeVar("T")


def split_of(content: str) -> Split:
    """The split of a question, from the first 8 bytes of the SHA-256 of its content."""
    head = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    return "heldout" if head < HELDOUT_SHARE * 2**64 else "train"


def check_request(split: str, count: int) -> None:
    """Refuse a split that does not exist and a negative count."""
    if split not in ("train", "heldout"):
        raise TaskError(f"split {split!r} does not exist: use 'train' or 'heldout'.")
    if count < 0:
        raise TaskError(f"count={count}: give 0 or more.")


def stable_rng(*key: object) -> random.Random:
    """A generator that depends only on the key, not on the process's hash seed."""
    return random.Random(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "big"))


def draw_distinct(
    make: Callable[[random.Random], T],
    content: Callable[[T], str],
    identity: Callable[[T], Hashable],
    split: Split,
    count: int,
    rng: random.Random,
    patience: int = _PATIENCE,
    most: int = 2 * _PATIENCE,
) -> list[T]:
    """Draw until ``count`` distinct items of the split are found; after ``patience`` misses items are repeated."""
    check_request(split, count)
    found: list[T] = []
    seen: set[Hashable] = set()
    misses = 0
    while len(found) < count:
        item = make(rng)
        if split_of(content(item)) == split and identity(item) not in seen:
            found.append(item)
            seen.add(identity(item))
            misses = 0
            continue
        misses += 1
        if misses == patience and seen:  # no new item: start a new pass over all of them
            seen.clear()
        elif misses > most:
            raise TaskError(
                f"no question of split {split!r} in {misses} draws: the task's space is too small to split."
            )
    return found


def choose_distinct(
    space: Sequence[T], content: Callable[[T], str], split: Split, count: int, rng: random.Random
) -> list[T]:
    """Distinct items from a space that can be listed: shuffled passes over it, each with every item once."""
    check_request(split, count)
    part = [item for item in space if split_of(content(item)) == split]
    if not part and count:
        raise TaskError(f"split {split!r} is empty: the task's space of {len(space)} questions is too small to split.")
    found: list[T] = []
    while len(found) < count:
        found += rng.sample(part, min(len(part), count - len(found)))
    return found


class PromptStream:
    """Prompts of one split in an order that depends only on the seed: ``next(3) + next(5)`` is ``next(8)``.

    The stream consists of blocks without repetition; each block has its own seed.
    """

    def __init__(self, task: Task | Environment, seed: int, split: Split = "train", position: int = 0) -> None:
        check_request(split, position)
        self.task, self.seed, self.split, self.position = task, seed, split, position
        self._block: tuple[int, list[Prompt]] | None = None

    def next(self, count: int) -> list[Prompt]:
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


def _block_seed(seed: int, number: int) -> int:
    """A seed per (seed, block) by Cantor's pairing: different for every pair."""
    seed = 2 * seed if seed >= 0 else -2 * seed - 1
    return (seed + number) * (seed + number + 1) // 2 + number

"""Whether a record's prompt stands in a held-out set already: the share of its word n-grams that the set has.

A prompt shorter than n words is compared as a whole. Words are in lower case, without punctuation around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earnest.replay.errors import CleaningError

HELDOUT_PROMPTS = 1_000
SEED = 20_240


@dataclass(frozen=True)
class Leakage:
    """Held-out texts as sets of n-grams; a text leaks where more than ``max_share`` of its own n-grams are in there."""

    n: int
    max_share: float
    grams: frozenset[tuple[str, ...]]
    texts: int

    @classmethod
    def of(cls, texts: Iterable[str], n: int = 8, max_share: float = 0.5) -> Leakage:
        held = list(texts)
        if not held:
            raise CleaningError("leakage: the held-out set has no text, so nothing could be found in it.")
        return cls(n, max_share, frozenset(gram for text in held for gram in _grams(text, n)), len(held))

    def share(self, text: str) -> float:
        own = _grams(text, self.n)
        return sum(gram in self.grams for gram in own) / len(own)


def _grams(text: str, n: int) -> list[tuple[str, ...]]:
    # All of a text's characters count here: "sort 3152" and "sort 1235" are two questions.
    found = [word.strip(".,;:!?\"'()[]{}").lower() for word in text.split()]
    return [tuple(found[i : i + n]) for i in range(len(found) - n + 1)] or [tuple(found)]


def heldout_texts(source: str) -> list[str]:
    """The texts of ``task:NAME`` (its held-out prompts), of a .jsonl (prompt, text or messages), or of a .txt."""
    kind, _, name = source.partition(":")
    if kind == "task" and name:
        from earnest.tasks import get_task

        prompts = get_task(name).prompts("heldout", HELDOUT_PROMPTS, SEED)
        return [_user_text(p.messages) for p in prompts]
    path = Path(source)
    if not path.is_file():
        raise CleaningError(f"leakage: heldout={source} is neither a file nor task:NAME.")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines if path.suffix != ".jsonl" else [_of_line(source, i, line) for i, line in enumerate(lines, 1)]


def _of_line(source: str, number: int, line: str) -> str:
    try:
        data = json.loads(line)
        for key in ("text", "prompt", "question"):
            if isinstance(data.get(key), str):
                return str(data[key])
        return _user_text(data["messages"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CleaningError(
            f"leakage: line {number} of {source} has none of text, prompt, question, messages; give one."
        ) from None


def _user_text(messages: Sequence[Any]) -> str:
    return "\n".join(str(m.get("content") or "") for m in messages if m.get("role") == "user")

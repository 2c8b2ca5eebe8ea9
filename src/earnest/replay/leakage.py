"""Whether a record's prompt contains a held-out text. The larger of two shares decides:

    the share of the prompt's word n-grams that the held-out set has, and
    the largest share of one held-out text's n-grams that the prompt has (a question inside a longer conversation).

A text shorter than n words is compared as a whole; it is searched in longer texts if it has at least ``LEAST`` words.
Words are in lower case, without punctuation around them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from earnest.replay.errors import CleaningError
from earnest.replay.filters import FilterResult

HELDOUT_PROMPTS = 1_000
SEED = 20_240
LEAST = 3


@dataclass(frozen=True)
class Leakage:
    """Held-out texts as n-grams; a text leaks where a share (see above) is more than ``max_share``. ``owners``: n-gram
    → the numbers of the texts that have it. ``sizes``: distinct n-grams of each text."""

    n: int
    max_share: float
    owners: Mapping[tuple[str, ...], frozenset[int]]
    sizes: tuple[int, ...]

    op: ClassVar[str] = "leakage"
    field: ClassVar[str] = "prompt"

    @property
    def settings(self) -> dict[str, float]:
        return {"n": self.n, "max": self.max_share, "heldout": len(self.sizes)}

    def judge(self, texts: Sequence[str]) -> list[FilterResult]:
        """Prompts that leak are not kept."""
        return [FilterResult(share <= self.max_share, share) for share in map(self.share, texts)]

    @classmethod
    def of(cls, texts: Iterable[str], n: int = 8, max_share: float = 0.5) -> Leakage:
        held = list(texts)
        if not held:
            raise CleaningError("leakage: the held-out set has no text, so nothing could be found in it.")
        sets = [set(_grams(text, n)) for text in held]
        owners: dict[tuple[str, ...], set[int]] = {}
        for number, grams in enumerate(sets):
            for gram in grams:
                owners.setdefault(gram, set()).add(number)
        return cls(n, max_share, {g: frozenset(o) for g, o in owners.items()}, tuple(len(s) for s in sets))

    def share(self, text: str) -> float:
        own = _grams(text, self.n)
        inside = set(own)
        for length in sorted({len(gram) for gram in self.owners if LEAST <= len(gram) < self.n}):
            inside |= set(_grams(text, length))
        found = Counter(number for gram in inside for number in self.owners.get(gram, ()))
        contained = max((count / self.sizes[number] for number, count in found.items()), default=0.0)
        return max(sum(gram in self.owners for gram in own) / len(own), contained)


def _grams(text: str, n: int) -> list[tuple[str, ...]]:
    # All of a text's characters count here: "sort 3152" and "sort 1235" are two questions.
    found = [word.strip(".,;:!?\"'()[]{}").lower() for word in text.split()]
    return [tuple(found[i : i + n]) for i in range(len(found) - n + 1)] or [tuple(found)]


def heldout_texts(source: str) -> list[str]:
    """The texts of ``task:NAME`` (its held-out prompts), of a .jsonl (prompt, text or messages), or of a .txt."""
    kind, _, name = source.partition(":")
    if kind == "task" and name:
        from earnest.tasks import get_task

        return [_user_text(p.messages) for p in get_task(name).prompts("heldout", HELDOUT_PROMPTS, SEED)]
    path = Path(source)
    if not path.is_file():
        raise CleaningError(f"leakage: heldout={source} is neither a file nor task:NAME.")
    try:  # not splitlines(): a JSON text may hold U+2028
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise CleaningError(f"leakage: heldout={source} is not UTF-8 ({error}); save it as UTF-8.") from None
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

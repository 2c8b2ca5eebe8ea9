"""Filters in plain Python that match data-juicer's operators.

    text_length            characters
    words                  pieces between blanks, without the special characters around them, that are not empty
    special_characters     share of characters that are not letters: punctuation, digits, blanks, symbols, emoji
    character_repetition   share of n-grams that are one of the most frequent repeated ones, √(distinct n-grams) at most
    word_repetition        share of word n-grams that occur more than once
    exact_duplicates       the same text, blanks at its ends apart; the first one stays
    near_duplicates        Jaccard similarity of character n-grams at or above a threshold; the first one stays

Near duplicates are exact here, by prefix filtering (Chaudhuri et al. 2006; Bayardo et al. 2007): two sets of similarity
≥ t share one of each other's |x| - ⌈t·|x|⌉ + 1 rarest members. data-juicer finds them by MinHash, with a chance to err
near the threshold.
"""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from earnest.errors import nearest
from earnest.replay.errors import CleaningError

FIELDS = ("prompt", "chosen", "rejected", "pair")
WITH_BOUNDS: Mapping[str, tuple[str, ...]] = {
    "text_length": ("min", "max"),
    "words": ("min", "max"),
    "special_characters": ("min", "max"),
    "character_repetition": ("n", "min", "max"),
    "word_repetition": ("n", "min", "max"),
}
DUPLICATES: Mapping[str, tuple[str, ...]] = {"exact_duplicates": (), "near_duplicates": ("n", "threshold")}
DEFAULT_N = {"character_repetition": 10, "word_repetition": 5, "near_duplicates": 5}
DEFAULT_THRESHOLD = 0.8


@dataclasses.dataclass(frozen=True)
class Op:
    """One filter: which field it reads, and its settings (``min``, ``max``, ``n``, ``threshold``)."""

    op: str
    field: str = "chosen"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {**WITH_BOUNDS, **DUPLICATES}
        if self.op not in known:
            raise CleaningError(f"filter {self.op!r} is unknown: {nearest(self.op, known)}")
        if self.field not in FIELDS:
            raise CleaningError(f"{self.op}: field {self.field!r} is unknown; it is one of {', '.join(FIELDS)}.")
        for name in self.settings:
            if name not in known[self.op]:
                raise CleaningError(
                    f"{self.op}: has no setting {name!r}; it has {', '.join(known[self.op]) or 'none'}."
                )
        if self.op in WITH_BOUNDS and not {"min", "max"} & set(self.settings):
            raise CleaningError(f"{self.op}: has neither min nor max, so it would keep everything; give one.")
        if self.low > self.high:
            raise CleaningError(f"{self.op}: min {self.low:g} is above max {self.high:g}; nothing could pass.")
        if not 0 < self.threshold <= 1:
            raise CleaningError(f"{self.op}: threshold {self.threshold:g} must be above 0 and at most 1.")
        if self.n < 1:
            raise CleaningError(f"{self.op}: n is {self.n}; an n-gram has at least one part.")

    @property
    def low(self) -> float:
        return float(self.settings.get("min", -math.inf))

    @property
    def high(self) -> float:
        return float(self.settings.get("max", math.inf))

    @property
    def n(self) -> int:
        return int(self.settings.get("n", DEFAULT_N.get(self.op, 1)))

    @property
    def threshold(self) -> float:
        return float(self.settings.get("threshold", DEFAULT_THRESHOLD))


@dataclasses.dataclass(frozen=True)
class FilterResult:
    """On one text: kept or not, the measured value, and for a duplicate the number of the text that it repeats."""

    keep: bool
    value: float | None = None
    twin: int | None = None


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def judge(self, op: Op, texts: Sequence[str]) -> list[FilterResult]: ...


class BuiltIn:
    name = "built-in"

    def judge(self, op: Op, texts: Sequence[str]) -> list[FilterResult]:
        if op.op == "exact_duplicates":
            return _repeats([text.strip() for text in texts])
        if op.op == "near_duplicates":
            return near_duplicates(texts, op.n, op.threshold)
        values = [MEASURES[op.op](text, op.n) for text in texts]
        return [FilterResult(op.low <= value <= op.high, value) for value in values]


def is_special(character: str) -> bool:
    """By Unicode's category; data-juicer's fixed list agrees on ASCII and differs in other scripts."""
    return unicodedata.category(character)[0] not in "LM"  # neither a letter nor a mark on one


def words(text: str) -> list[str]:
    found = []
    for piece in re.split("[ \n\t]", text):
        plain = [i for i, character in enumerate(piece) if not is_special(character)]
        if plain:
            found.append(piece[plain[0] : plain[-1] + 1])
    return found


def special_share(text: str) -> float:
    return sum(map(is_special, text)) / len(text) if text else 0.0


def character_repetition(text: str, n: int) -> float:
    counts = sorted(Counter(text[i : i + n] for i in range(len(text) - n + 1)).values(), reverse=True)
    if not counts:
        return 0.0
    repeated = sum(count > 1 for count in counts)
    return sum(counts[: min(math.isqrt(len(counts)), repeated)]) / sum(counts)


def word_repetition(text: str, n: int) -> float:
    found = [word.lower() for word in words(text)]
    counts = Counter(tuple(found[i : i + n]) for i in range(len(found) - n + 1)).values()
    return sum(count for count in counts if count > 1) / sum(counts) if counts else 0.0


MEASURES: Mapping[str, Callable[[str, int], float]] = {
    "text_length": lambda text, _: float(len(text)),
    "words": lambda text, _: float(len(words(text))),
    "special_characters": lambda text, _: special_share(text),
    "character_repetition": character_repetition,
    "word_repetition": word_repetition,
}


def _repeats(keys: Sequence[str]) -> list[FilterResult]:
    first: dict[str, int] = {}
    return [
        FilterResult(first.setdefault(key, i) == i, twin=None if first[key] == i else first[key])
        for i, key in enumerate(keys)
    ]


def shingles(text: str, n: int) -> frozenset[str]:
    """The character n-grams of a text, in lower case; a shorter text is one n-gram."""
    low = text.lower()
    return frozenset(low[i : i + n] for i in range(len(low) - n + 1)) or frozenset({low})


def near_duplicates(texts: Sequence[str], n: int, threshold: float) -> list[FilterResult]:
    """A text is dropped if it is similar to an earlier one, directly or through others: the first of a cluster
    stays."""
    sets = [shingles(text, n) for text in texts]
    rarity = Counter(gram for own in sets for gram in own)
    first = list(range(len(texts)))  # the first member of each text's cluster
    seen: defaultdict[str, list[int]] = defaultdict(list)
    best: dict[int, float] = {}
    for i, own in enumerate(sets):
        prefix = sorted(own, key=lambda gram: (rarity[gram], gram))[: len(own) - math.ceil(threshold * len(own)) + 1]
        for j in sorted({j for gram in prefix for j in seen[gram]}):
            likeness = jaccard(own, sets[j])
            if likeness >= threshold:
                best[i] = max(best.get(i, 0.0), likeness)
                a, b = sorted((_root(first, i), _root(first, j)))
                first[b] = a
        for gram in prefix:
            seen[gram].append(i)
    roots = [_root(first, i) for i in range(len(texts))]
    return [FilterResult(r == i, best.get(i), None if r == i else r) for i, r in enumerate(roots)]


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def _root(first: list[int], i: int) -> int:
    while first[i] != i:
        first[i] = first[first[i]]
        i = first[i]
    return i

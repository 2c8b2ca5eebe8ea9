"""CENSUS: What exists is what was requested, no more and no less (adapted layers, loaded keys, logged names).

Needs: wanted and found: two collections of names, or of names and numbers; once=True where none may come twice
How: Both sets are compared, and their numbers where there are any.
Exceptions: Names that differ by a wrapper's prefix must be brought to one form first.
Detects: a greedy pattern that reads an expert's index as the layer's; a target list that matches nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from earnest_audit.law import Law
from earnest_audit.verdict import Finding


@dataclass
class Census:
    """``wanted`` and ``found`` are names; ``what`` names their kind. Two mappings of names to numbers (how many rows a
    source has) are compared by their numbers too. ``once=True`` where no name may be found twice: shards, ranks, parts
    that make up a whole."""

    wanted: Iterable[str] | Mapping[str, float]
    found: Iterable[str] | Mapping[str, float]
    what: str = "adapted modules"
    once: bool = False

    def check(self) -> Iterator[Finding]:
        listed = list(self.found)  # once: a generator can be read only once
        wanted, found = set(self.wanted), set(listed)
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        odd = ", ".join([*missing[:3], *extra[:3]])
        yield LAW.finding(
            self.what, f"{len(missing)} missing, {len(extra)} not requested", "exactly what was requested",
            not missing and not extra and bool(wanted), f"{odd}: a pattern matches too much or nothing.",
        )  # fmt: skip
        mine, theirs = _numbers(self.wanted), _numbers(self.found)
        if mine is not None and theirs is not None:
            both = [n for n in mine if n in theirs]
            off = [f"{n}: {theirs[n]} of {mine[n]}" for n in both if mine[n] != theirs[n]]
            differ = f"{len(off)} of {len(both)} differ"
            yield LAW.none(f"{self.what}, how many", off, differ, ": something is lost, or counted twice.")
        if self.once:
            twice = sorted(n for n, k in Counter(listed).items() if k > 1)
            more = ": two parts hold the same, or one thing is done twice."
            yield LAW.none(f"{self.what}, each once", twice, f"{len(twice)} found more than once", more)


def _numbers(names: Iterable[str] | Mapping[str, float]) -> Mapping[str, float] | None:
    return names if isinstance(names, Mapping) and all(isinstance(v, int | float) for v in names.values()) else None


LAW = Law("CENSUS", "census (Census)", __doc__, Census.check)

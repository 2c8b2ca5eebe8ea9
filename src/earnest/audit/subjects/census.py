"""A census: what was asked for is what is there, no more and no less (adapted layers, loaded keys, logged names)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from earnest.audit.law import Law
from earnest.audit.subjects.base import judged
from earnest.audit.verdict import Finding


@dataclass
class Census:
    """``wanted`` and ``found`` are names; ``what`` says of what."""

    wanted: Iterable[str]
    found: Iterable[str]
    what: str = "adapted modules"

    def check(self) -> Iterator[Finding]:
        wanted, found = set(self.wanted), set(self.found)  # once each: a generator can be read but once
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        shown = f"{len(missing)} missing, {len(extra)} not asked for"
        odd = ", ".join([*missing[:3], *extra[:3]])
        holds = not missing and not extra and bool(wanted)
        yield judged(
            "GL",
            self.what,
            shown,
            "exactly what was asked for",
            holds,
            f"{odd}: a pattern matches too much or nothing.",
        )


LAW = Law(
    code="GL",
    name="census (Census)",
    sentence="What was asked for is what is there, no more and no less.",
    needs="wanted and found: two collections of names",
    how="Both sets are compared.",
    traps="None: names that differ by a wrapper's prefix have to be brought to one form first.",
    caught="a greedy pattern that reads an expert's index as the layer's; a target list that matches nothing",
    check=Census.check,
)

"""Census: what exists is what was requested, no more and no less (adapted layers, loaded keys, logged names)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from earnest.audit.law import Law
from earnest.audit.subjects.base import judged
from earnest.audit.verdict import Finding


@dataclass
class Census:
    """``wanted`` and ``found`` are names; ``what`` names their kind. Two mappings of names to numbers (how many rows a
    source has) are compared by their numbers too. ``once=True`` where no name may be found twice: shards, ranks, parts
    that make up a whole."""

    wanted: Iterable[str]
    found: Iterable[str]
    what: str = "adapted modules"
    once: bool = False

    def check(self) -> Iterator[Finding]:
        listed = list(self.found)  # once each: a generator can be read but once
        wanted, found = set(self.wanted), set(listed)
        missing, extra = sorted(wanted - found), sorted(found - wanted)
        shown = f"{len(missing)} missing, {len(extra)} not requested"
        odd = ", ".join([*missing[:3], *extra[:3]])
        holds = not missing and not extra and bool(wanted)
        yield judged(
            "GL",
            self.what,
            shown,
            "exactly what was requested",
            holds,
            f"{odd}: a pattern matches too much or nothing.",
        )
        if _numbers(self.wanted) and _numbers(self.found):
            yield self._counts(cast(Mapping[str, float], self.wanted), cast(Mapping[str, float], self.found))
        if self.once:
            twice = sorted(n for n, k in Counter(listed).items() if k > 1)
            yield judged(
                "GL", f"{self.what}, each once", f"{len(twice)} found more than once", "none", not twice,
                f"{', '.join(twice[:3])}: two parts hold the same, or one thing is done twice.",
            )  # fmt: skip

    def _counts(self, wanted: Mapping[str, float], found: Mapping[str, float]) -> Finding:
        both = [n for n in wanted if n in found]
        off = [n for n in both if wanted[n] != found[n]]
        named = ", ".join(f"{n}: {found[n]} of {wanted[n]}" for n in off[:3])
        return judged(
            "GL", f"{self.what}, how many", f"{len(off)} of {len(both)} differ", "none", not off,
            f"{named}: something is lost, or counted twice.",
        )  # fmt: skip


def _numbers(names: Iterable[str]) -> bool:
    return isinstance(names, Mapping) and all(isinstance(v, int | float) for v in names.values())


LAW = Law(
    code="GL",
    name="census (Census)",
    sentence="What exists is what was requested, no more and no less.",
    needs="wanted and found: two collections of names, or of names and numbers; once=True where none may come twice",
    how="Both sets are compared, and their numbers where there are any.",
    traps="Names that differ by a wrapper's prefix must be brought to one form first.",
    caught="a greedy pattern that reads an expert's index as the layer's; a target list that matches nothing",
    check=Census.check,
)

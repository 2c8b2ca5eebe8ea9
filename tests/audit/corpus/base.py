"""One real defect: the step as it was, the step as it was mended, and the laws of which at least one must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from earnest_audit import Step, Subject

Thing = Step | Subject


@dataclass(frozen=True)
class Defect:
    """``laws`` are the codes that the description names; ``what`` is the symptom in a few words."""

    id: str
    what: str
    laws: frozenset[str]
    broken: Callable[[], Thing]
    mended: Callable[[], Thing]


DEFECTS: list[Defect] = []


def defect(
    id: str, what: str, laws: str, mended: Callable[[], Thing]
) -> Callable[[Callable[[], Thing]], Callable[[], Thing]]:
    def add(broken: Callable[[], Thing]) -> Callable[[], Thing]:
        DEFECTS.append(Defect(id, what, frozenset(laws.split()), broken, mended))
        return broken

    return add

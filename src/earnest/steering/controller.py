"""Lower the dose until enough samples survive the filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from earnest.steering.errors import SteeringError, TooFewSurvivors
from earnest.steering.filter import Filter, SteeredSample


@dataclass(frozen=True)
class Try:
    """One dose: the number of samples, the number of survivors, and the reasons that refused the others."""

    dose: float
    sampled: int
    survived: int
    refused: dict[str, int]


@dataclass(frozen=True)
class DoseSearch:
    """The survivors at the first dose with enough of them, and every dose that was tried."""

    dose: float
    survivors: list[SteeredSample]
    tries: tuple[Try, ...]


def walk_down(
    sample: Callable[[float], Sequence[SteeredSample]],
    limits: Filter,
    dose: float,
    enough: int,
    *,
    factor: float = 0.75,
    tries: int = 6,
) -> DoseSearch:
    """Sample at ``dose``, factor·dose, … until ``enough`` samples survive; raise after ``tries`` doses."""
    if not 0 < factor < 1:
        raise SteeringError(f"factor is {factor}; it lowers the dose, so give a number between 0 and 1.")
    if enough < 1 or tries < 1:
        raise SteeringError(f"enough is {enough} and tries {tries}; both are at least 1.")
    seen: list[Try] = []
    for step in range(tries):
        at = dose * factor**step
        found = list(sample(at))
        kept = limits.survivors(found)
        seen.append(Try(at, len(found), len(kept), limits.counts(found)))
        if len(kept) >= enough:
            return DoseSearch(at, kept, tuple(seen))
    counts = [", ".join(f"{n} by {why}" for why, n in sorted(t.refused.items(), key=lambda i: -i[1])) for t in seen]
    shown = "; ".join(
        f"dose {t.dose:.3g}: {t.survived} of {t.sampled}, {refused or 'none refused'}"
        for t, refused in zip(seen, counts, strict=True)
    )
    raise TooFewSurvivors(
        f"{enough} steered samples have to survive the filter, and at no dose did that many ({shown}). Sample more, "
        "lower the target of the dose, or check whether the filter separates."
    )

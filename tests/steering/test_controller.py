"""The controller lowers the dose, uses the first one with enough survivors, and raises if there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.steering import Filter, SteeringError, TooFewSurvivors, walk_down
from earnest.steering.filter import SteeredSample

LIMITS = Filter(tail_perplexity=10.0)


def samples(dose: float, count: int = 20) -> list[SteeredSample]:
    """The share of answers that survive is 1 − dose."""
    sane = round(count * max(0.0, 1 - dose))
    return [SteeredSample((1,), (2,), "A fox.", 2.0 if i < sane else 99.0) for i in range(count)]


@settings(max_examples=25)
@given(st.floats(0.05, 3.0), st.integers(1, 18), st.floats(0.3, 0.8))
def test_the_first_dose_that_is_low_enough(dose: float, enough: int, factor: float) -> None:
    doses = [dose * factor**i for i in range(60)]
    first = next(i for i, d in enumerate(doses) if len(LIMITS.survivors(samples(d))) >= enough)
    found = walk_down(samples, LIMITS, dose, enough, factor=factor, tries=60)
    assert found.dose == pytest.approx(doses[first]) and len(found.tries) == first + 1
    assert len(found.survivors) >= enough and all(t.survived < enough for t in found.tries[:-1])


def test_too_few_survivors_lists_the_doses_and_reasons() -> None:
    with pytest.raises(TooFewSurvivors, match=r"dose 4: 0 of 20, 20 by tail perplexity; dose 3: 0 of 20.*Sample more"):
        walk_down(samples, LIMITS, 4.0, 5, factor=0.75, tries=3)
    doses: list[float] = []
    with pytest.raises(TooFewSurvivors):
        walk_down(lambda dose: doses.append(dose) or samples(9.0), LIMITS, 1.0, 5)  # type: ignore[func-returns-value]
    assert doses == pytest.approx([0.75**i for i in range(6)]), "six doses by default"


def test_what_is_refused() -> None:
    with pytest.raises(SteeringError, match="factor is 1"):
        walk_down(samples, LIMITS, 1.0, 5, factor=1)
    with pytest.raises(SteeringError, match="at least 1"):
        walk_down(samples, LIMITS, 1.0, 0)

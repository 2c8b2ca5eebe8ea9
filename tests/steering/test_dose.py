"""The dose: bisection on known curves, and on nano against a KL computed from full logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import earnest as en
from earnest.steering import SteeringError, calibrate_dose, mean_difference
from earnest.steering.dose import bisect, states, token_kl


@given(st.floats(0.01, 50), st.floats(0.5, 20), st.floats(0.7, 3))
def test_bisection_finds_the_root_of_a_power(target: float, scale: float, power: float) -> None:
    found = bisect(lambda c: scale * c**power, target)
    assert abs(found.kl - target) <= 0.02 * target
    assert found.coefficient == pytest.approx((target / scale) ** (1 / power), rel=0.05)
    assert (found.coefficient, found.kl) == found.tried[-1]


def test_a_curve_that_is_not_monotone_is_crossed_anyway() -> None:
    found = bisect(lambda c: c + 0.6 * math.sin(7 * c), 2.0, 1e-6)
    assert found.kl == pytest.approx(2.0, rel=1e-5)


def test_a_jump_over_the_target_ends() -> None:
    found = bisect(lambda c: float(c >= 0.3), 0.5)
    assert found.coefficient == pytest.approx(0.3, rel=1e-4) and len(found.tried) < 60


def test_what_is_refused() -> None:
    with pytest.raises(SteeringError, match="above 0"):
        bisect(lambda c: c, 0.0)
    with pytest.raises(SteeringError, match="almost no effect"):
        bisect(lambda c: 1e-9 * c, 1.0)
    with pytest.raises(SteeringError, match="without the vector"):
        bisect(lambda c: 2.0 + c, 1.0)


def test_on_nano_the_dose_gives_the_nats(nano: en.Policy, contexts: tuple[list[list[int]], list[list[int]]]) -> None:
    """The 95th percentile of KL(steered‖plain), once by the engine's pass and once from softmaxes of full logits."""
    high, low = contexts
    prompts = [nano.render([{"role": "user", "content": f"Describe the {t}."}]) for t in ("fox", "river", "lamp")]
    batch = en.Batch.from_rows(prompts, [nano.encode(" is small and quick.")] * 3, role="demonstration")
    vector = mean_difference(nano, high, low, [1, 2])
    dose = calibrate_dose(nano, vector, batch, 0.7)
    assert dose.kl == pytest.approx(0.7, rel=0.05) and dose.coefficient > 0

    def plain_logits() -> torch.Tensor:
        with torch.no_grad():
            return nano.model(batch.inputs).logits[batch.row, batch.position].double().log_softmax(-1)

    base = plain_logits()
    with vector.applied(nano, dose.coefficient):
        steered = plain_logits()
    kl = (steered.exp() * (steered - base)).sum(-1)
    assert float(kl.quantile(0.95)) == pytest.approx(dose.kl, rel=1e-3)
    home = states(nano, batch)
    assert float(token_kl(nano, batch, home).abs().max()) < 1e-5
    # measured from other states the dose differs
    with vector.applied(nano, 0.05):
        elsewhere = states(nano, batch)
    assert calibrate_dose(nano, vector, batch, 0.7, base=elsewhere).coefficient > dose.coefficient

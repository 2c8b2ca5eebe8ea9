"""Healing: earlier adapters and the base do not change, the barrier follows its aggregate, λ depends on the round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import earnest as en
from earnest.objectives import KLBarrier, Objective
from earnest.objectives.trust import AGGREGATES
from earnest.signals import with_reference
from earnest.steering import Healing, SteeringError, heal
from earnest.steering.filter import SteeredSample, read
from earnest.steering.heal import demonstrations
from experiments.heal.loop import equal_firing, observer

LORA = en.LoRA(rank=4)
TARGETS = ("q_proj", "v_proj")


@pytest.fixture
def survivors(nano: en.Policy) -> list[SteeredSample]:
    prompts = [
        nano.render([{"role": "user", "content": f"Describe the {t}."}]) for t in ("fox", "lake", "lamp", "road")
    ]
    texts = [f"Dear friend, the {t} is lovely! I am glad you asked!" for t in ("fox", "lake", "lamp", "road")]
    return read(nano, prompts, [nano.encode(t) for t in texts])


def test_a_round_trains_only_its_own_adapter(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    how = Healing(steps=4, rows=3, pressure_every=2, tau=0.01)
    first = heal(nano, survivors, LORA, how=how, targets=TARGETS, seed=1)
    kept = first.adapter.state_dict()
    second = heal(nano, survivors, LORA, how=how, targets=TARGETS, round_number=1, seed=2)
    try:
        now = first.adapter.state_dict()
        assert all(torch.equal(kept[k], now[k]) for k in kept), "history moved"
        assert not first.adapter.parameters() and not second.adapter.parameters(), "both are frozen"
        assert any(v.abs().max() > 0 for k, v in second.adapter.state_dict().items() if k.endswith("B"))
        facts = second.summary()
        assert facts["nll_last"] < first.summary()["nll_first"] and facts["pressure"] > 0 and 0 < facts["firing"] <= 1
        assert "against previous" in second.reports[0].terms["kl_barrier"].ran
        assert [r.terms["sft"].gradient_norm is not None for r in second.reports] == [False, True, False, True]
    finally:
        second.adapter.detach()
        first.adapter.detach()


def test_the_same_seed_is_the_same_round_bit_for_bit(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    states = []
    for _ in range(2):
        done = heal(nano, survivors, LORA, how=Healing(steps=3, rows=2), targets=TARGETS, seed=7)
        states.append(done.adapter.state_dict())
        done.adapter.detach()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.parametrize("reference", ["base", "previous"])
def test_a_barrier_keeps_the_policy_nearer_to_its_reference(
    nano: en.Policy, survivors: list[SteeredSample], reference: str
) -> None:
    """A strong barrier ends nearer to its reference than a barrier that is never active, from the same start."""
    ends = {}
    for tau in (0.05, 1e6):
        how = Healing(steps=12, rows=4, tau=tau, over="rmse", reference=reference, weight=20.0)
        done = heal(nano, survivors, LORA, en.AdamW(lr=5e-3), how=how, targets=TARGETS, seed=3)
        ends[tau] = done.summary()["aggregate_last"]
        done.adapter.detach()
    assert ends[0.05] < 0.5 * ends[1e6]


def test_lambda_grows_with_the_round(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    for number, growth, expected in ((0, 1.0, 2.0), (2, 1.0, 6.0), (3, -0.5, 1.0)):
        how = Healing(steps=1, rows=2, weight=2.0, growth=growth)
        done = heal(nano, survivors, LORA, how=how, targets=TARGETS, round_number=number)
        done.adapter.detach()
        assert done.summary()["strength"] == pytest.approx(expected)


def test_the_spectral_cap_is_part_of_the_objective(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    sizes = {}
    for cap in (0.0, None):
        how = Healing(steps=8, rows=4, tau=1e6, cap=cap, cap_weight=5.0)
        done = heal(nano, survivors, LORA, en.AdamW(lr=5e-3), how=how, targets=TARGETS)
        sizes[cap] = max(float(torch.linalg.matrix_norm(delta, 2)) for _, delta in done.adapter.deltas())
        assert ("sigma_max" in done.summary()) is (cap is not None)
        done.adapter.detach()
    assert sizes[0.0] < 0.7 * sizes[None]


def test_a_failed_round_leaves_no_adapter(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    with pytest.raises(ValueError, match="kl_barrier"):
        heal(nano, survivors, LORA, objective=Objective.of(KLBarrier()) + KLBarrier(), targets=TARGETS)
    with pytest.raises(ValueError, match="rollout"):
        heal(nano, survivors, LORA, objective=Objective.of(en.GRPO()), targets=TARGETS)
    en.attach(nano, LORA, TARGETS, name="default").detach()


def test_settings_are_checked() -> None:
    for wrong in ({"steps": 0}, {"rows": 0}, {"pressure_every": 0}, {"over": "median"}, {"reference": "next"}):
        with pytest.raises(ValueError, match=str(next(iter(wrong)))):
            Healing(**wrong)


# --- τ ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10_000), min_size=4, max_size=40, unique=True), st.floats(0.1, 0.9))
def test_equal_firing_fires_equally(values: list[int], rate: float) -> None:
    """On the measurements themselves: the share above τ is the rate, to within one step, for any monotone aggregate."""
    readings = {"mean": [v / 100 for v in values], "max": [v / 10 + 3 for v in values]}
    tau = equal_firing(readings, rate)
    shares = {over: sum(v > tau[over] for v in series) / len(series) for over, series in readings.items()}
    assert abs(shares["mean"] - shares["max"]) <= 1 / len(values) + 1e-9
    assert all(abs(share - rate) <= 1.01 / len(values) + 1e-9 for share in shares.values())


def test_equal_firing_refuses_no_rate() -> None:
    for rate in (0.0, 1.0):
        with pytest.raises(SteeringError, match="share of the steps"):
            equal_firing({"mean": [1.0]}, rate)


def test_the_observer_measures_and_never_acts(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    """Four measurements per step of one run, which equals SFT alone (up to the rounding of a wider pass)."""
    how = Healing(steps=4, rows=3)
    watched = heal(nano, survivors, LORA, how=how, objective=observer(), targets=TARGETS, seed=5)
    state, readings = watched.adapter.state_dict(), {o: watched.series(o, "aggregate") for o in AGGREGATES}
    watched.adapter.detach()
    alone = heal(nano, survivors, LORA, how=how, objective=Objective.of(en.SFT()), targets=TARGETS, seed=5)
    own = alone.adapter.state_dict()
    alone.adapter.detach()
    for name, value in own.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
    for at in range(1, 4):
        assert 0 < readings["mean"][at] < readings["rmse"][at] < readings["max"][at]
    assert all(series[0] < 1e-6 for series in readings.values()), "a new adapter begins at its reference"


# --- the synthetic loop, through a real model -----------------------------------------------------------------------


def test_a_loop_of_four_tokens_in_sixty_passes_under_the_mean_and_not_under_the_rmse(nano: en.Policy) -> None:
    """56 tokens on which student and reference agree, 4 on which the student has begun to loop.

    The student is the policy; the reference differs from it only at the four positions of the loop. τ = 1 lies above
    the mean of the divergences and below their rmse: only the rmse's barrier has a loss and a gradient, and its
    gradient is that of the loop alone.
    """
    adapter = en.attach(nano, LORA, TARGETS)
    try:
        engine = en.LocalEngine(nano, adapter, en.AdamW(lr=1e-3))
        text = nano.encode("The quick fox runs by the lake. " * 12)[:60]
        batch = en.Batch.from_rows([nano.encode("Say it.")], [text], role="demonstration")
        batch = with_reference(engine, batch, KLBarrier())
        assert batch.reference is not None and len(text) == 60
        states = batch.reference.distribution.states.clone()  # type: ignore[union-attr]
        loop = [30, 31, 32, 33]
        # The reference's states at these positions are those of other positions, so its predictions differ.
        states[loop] = states[[3, 9, 14, 20]]
        held = batch.with_signals(reference=en.Reference(None, en.Hidden(states)))
        kl = engine.scalars(held, [KLBarrier().need])[KLBarrier().need].values
        quiet = torch.tensor([i not in loop for i in range(60)])
        assert float(kl[quiet].max()) < 1e-4 and float(kl[loop].min()) > 1
        force = {}
        for over in ("mean", "rmse"):
            barrier = KLBarrier(over=over, tau=1.0)
            gradients = engine.gradients(held, barrier)
            force[over] = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
            report = engine.step(held, barrier) if over == "rmse" else None
        assert force["mean"] == 0 and force["rmse"] > 0
        told = report.terms["kl_barrier"].metrics  # type: ignore[union-attr]
        assert told["aggregate"] == pytest.approx(float(kl.square().mean().sqrt()), rel=1e-4) and told["beyond"] == 1
        assert report.loss == pytest.approx(told["aggregate"] - 1.0, rel=1e-3)  # type: ignore[union-attr]
        after = engine.scalars(held, [KLBarrier().need])[KLBarrier().need].values
        assert float(after[loop].square().sum()) < float(kl[loop].square().sum()), "and the step pulls the loop back"
    finally:
        adapter.detach()


def test_demonstrations_are_rows_to_imitate(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    batch = demonstrations(nano, survivors)
    assert set(batch.role) == {"demonstration"} and batch.active.shape[0] == sum(len(s.tokens) for s in survivors)


def test_the_step_obeys_the_laws_of_the_audit(nano: en.Policy, survivors: list[SteeredSample]) -> None:
    """SFT + barrier against the previous round, on frozen adapters: audited like any other training step."""
    history = heal(nano, survivors, LORA, how=Healing(steps=2, rows=4), targets=TARGETS, seed=1).adapter
    top = en.attach(nano, LORA, TARGETS, seed=2)
    try:
        engine = en.LocalEngine(nano, top, en.AdamW(lr=2e-3))
        objective = Healing(tau=0.0, reference="previous").objective()
        batch = with_reference(engine, demonstrations(nano, survivors), objective)
        engine.step(batch, objective)  # at initialization it is its own reference: the barrier has no gradient
        verdict = en.prove(engine, objective, batch)
        assert verdict.holds, str(verdict)
    finally:
        top.detach()
        history.detach()

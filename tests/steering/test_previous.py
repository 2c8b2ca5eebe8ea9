"""A barrier against the previous round: frozen adapters on, the trained adapter off; the base has no adapter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import earnest as en
from earnest.errors import ConfigError, SignalError
from earnest.objectives import SFT, KLBarrier, Objective, ReferenceKL
from earnest.signals import EMATeacher, Hidden, with_reference, with_teacher
from earnest.signals.scorer import HiddenWanted
from tests.engines.conftest import perturb, tiny_policy

PROMPTS = [[3, 4], [5, 6, 7]]
COMPLETIONS = [[8, 9, 10], [12, 13]]


def rows() -> en.Batch:
    return en.Batch.from_rows(PROMPTS, COMPLETIONS, role="demonstration")


def stacked() -> tuple[en.LocalEngine, Tensor, Tensor]:
    """An engine on the second of two adapters; the states of the untouched base, and of the first round."""
    policy = tiny_policy()
    batch = rows()

    def states() -> Tensor:
        with torch.no_grad():
            return policy.hidden(batch.inputs)[batch.row, batch.position]

    base = states()
    history = en.attach(policy, en.LoRA(rank=2), targets=("q_proj", "v_proj"), seed=0)
    perturb(history)
    history.freeze()
    first = states()
    top = en.attach(policy, en.LoRA(rank=2), targets=("q_proj", "v_proj"), seed=1)
    perturb(top, seed=2)
    return en.LocalEngine(policy, top, en.AdamW(lr=1e-2)), base, first


def filled(engine: en.LocalEngine, reference: str) -> Tensor:
    made = with_reference(engine, rows(), SFT() + KLBarrier(reference=reference)).reference
    assert made is not None and made.kind == reference and isinstance(made.distribution, Hidden)
    return made.distribution.states


def test_three_policies_in_one_set_of_weights() -> None:
    """Before, `base` switched only the trained adapter off: with frozen adapters below, it was the previous round."""
    engine, base, first = stacked()
    assert torch.equal(filled(engine, "base"), base) and torch.equal(filled(engine, "previous"), first)
    live = engine.score(rows(), HiddenWanted())
    assert isinstance(live, Hidden)
    for a, b in ((base, first), (first, live.states), (base, live.states)):
        assert (a - b).abs().max() > 1e-3
    with pytest.raises(ConfigError, match="'live', 'base' or 'previous'"):
        engine.score(rows(), HiddenWanted(), "last")  # type: ignore[arg-type]


def test_the_gates_are_back_afterwards_and_training_moves_neither_reference() -> None:
    engine, base, first = stacked()
    objective = SFT() + KLBarrier(tau=0.0, reference="previous")
    before = engine.score(rows(), HiddenWanted())
    batch = with_reference(engine, rows(), objective)
    after = engine.score(rows(), HiddenWanted())
    assert isinstance(before, Hidden) and isinstance(after, Hidden) and torch.equal(before.states, after.states)
    assert "against previous" in engine.step(batch, objective).terms["kl_barrier"].ran
    assert torch.equal(filled(engine, "base"), base) and torch.equal(filled(engine, "previous"), first)


def test_a_new_round_begins_at_its_reference() -> None:
    """At initialization the divergence to the previous round is 0; the divergence to the base is not."""
    engine, _, _ = stacked()
    engine.adapter.freeze()
    fresh = en.attach(engine.policy, en.LoRA(rank=2), targets=("q_proj", "v_proj"), seed=5)
    newer = en.LocalEngine(engine.policy, fresh, en.AdamW(lr=1e-2))
    for reference, zero in (("previous", True), ("base", False)):
        term = KLBarrier(tau=0.0, reference=reference)
        batch = with_reference(newer, rows(), term)
        values = newer.scalars(batch, term.needs(batch, {}))[term.need].values
        assert (float(values.abs().max()) < 1e-9) is zero


def test_one_batch_has_one_reference() -> None:
    engine, _, _ = stacked()
    with pytest.raises(SignalError, match=r"kl_barrier: previous.*reference_kl: base"):
        with_reference(engine, rows(), KLBarrier(reference="previous") + ReferenceKL())
    against_base = with_reference(engine, rows(), KLBarrier())
    kept = with_reference(engine, against_base, KLBarrier(reference="previous"))
    assert kept.reference == against_base.reference, "what the batch carries is kept"
    with pytest.raises(SignalError, match="uses the 'previous' policy"):
        Objective.of(KLBarrier(reference="previous")).check(kept)


def test_the_average_teacher_includes_earlier_adapters() -> None:
    """Its hooks add the average of the trained adapter's ΔW to the base with earlier adapters."""
    engine, _, first = stacked()
    with torch.no_grad():
        for p in engine.parameters:
            p.zero_()
    teacher = EMATeacher(engine.adapter)
    made = with_teacher(engine, rows(), [list(p) for p in PROMPTS], teacher).teacher
    assert made is not None and isinstance(made.distribution, Hidden)
    torch.testing.assert_close(made.distribution.states, first)

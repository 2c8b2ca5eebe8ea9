"""Law GL on an engine: a correct step holds, each way of not training fails, and the engine is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import earnest as en
from earnest.engines import LocalEngine
from earnest.objectives import GRPO
from earnest.objectives.base import Term, Value
from earnest.objectives.needs import LogProb, Need
from earnest.objectives.view import View
from earnest.proving.proof import restored
from earnest.signals import Batch
from earnest_audit import LawBroken
from tests.engines.conftest import batch as batch
from tests.engines.conftest import make_engine as make_engine

Make = Callable[..., LocalEngine]


@dataclass(frozen=True, kw_only=True)
class Dead(Term):
    """A log-softmax over an axis of length 1: always 0, and so is its gradient."""

    kind: ClassVar[str] = "dead"
    paper: ClassVar[str] = "none"

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (LogProb(),)

    def evaluate(self, view: View) -> Value:
        return Value(view.scalar(LogProb())[:, None].log_softmax(-1).sum(), "dead", {})


@pytest.mark.parametrize("perturbed", [True, False])
def test_a_healthy_step_holds_and_is_left_as_it_was(make_engine: Make, batch: Batch, perturbed: bool) -> None:
    engine, twin = make_engine(perturbed=perturbed), make_engine(perturbed=perturbed)
    for each in (engine, twin):
        each.step(batch, GRPO(clip=0.2))
    group, state = engine.optimizer.param_groups[0], dict(engine.optimizer.state)
    verdict = en.prove(engine, GRPO(clip=0.2), batch)
    assert verdict.raise_if_failed().holds and "holds" in str(verdict)
    assert engine.optimizer.param_groups[0] is group, "a schedule may hold it"
    assert state and all(engine.optimizer.state[p] is own for p, own in state.items())
    for each in (engine, twin):
        each.step(batch, GRPO(clip=0.2))
    assert engine.version == twin.version == 2
    for p, q in zip(engine.parameters, twin.parameters, strict=True):
        assert torch.equal(p, q)


def test_updates_inside_a_block_are_undone_at_its_end(make_engine: Make, batch: Batch) -> None:
    engine = make_engine()
    before = [p.detach().clone() for p in engine.parameters]
    with restored(engine):
        engine.step(batch, GRPO(clip=0.2))
        assert engine.version == 1 and not torch.equal(engine.parameters[0], before[0])
    assert engine.version == 0 and not engine.optimizer.state
    assert all(torch.equal(p, value) for p, value in zip(engine.parameters, before, strict=True))


def test_a_term_that_is_always_0_fails_and_is_named(make_engine: Make, batch: Batch) -> None:
    verdict = en.prove(make_engine(), GRPO(clip=0.2) + 0.5 * Dead(), batch)
    assert "term dead" in {f.subject for f in verdict.failures} and "term grpo" not in {
        f.subject for f in verdict.failures
    }
    with pytest.raises(LawBroken, match="term dead adds nothing"):
        verdict.raise_if_failed()


def test_all_advantages_0_fails(make_engine: Make, batch: Batch) -> None:
    assert batch.advantages is not None
    nothing = batch.with_signals(advantages=torch.zeros_like(batch.advantages))
    assert not en.prove(make_engine(), GRPO(clip=0.2), nothing).holds


def test_a_parameter_without_a_path_to_the_loss_fails(make_engine: Make, batch: Batch) -> None:
    engine = make_engine(perturbed=False)
    with torch.no_grad():
        for name, p in engine.adapter.named_parameters().items():
            if "layers.1.self_attn.v_proj" in name:
                p.zero_()  # A = B = 0: zero times zero, for ever
    failures = en.prove(engine, GRPO(clip=0.2), batch).failures
    assert failures and all("layers.1.self_attn.v_proj" in f.meaning for f in failures)


def test_a_base_weight_that_trains_along_fails(make_engine: Make, batch: Batch) -> None:
    engine = make_engine()
    norm = engine.policy.model.model.norm.weight
    original = norm.detach().clone()
    engine.optimizer.register_step_post_hook(lambda *_: norm.data.add_(1e-3))
    verdict = en.prove(engine, GRPO(clip=0.2), batch)
    assert any("model.norm.weight moved although frozen" in f.meaning for f in verdict.failures)
    assert not torch.equal(norm, original), (
        "the probe restores what the engine owns; a foreign hook's damage stays visible"
    )


def test_an_update_that_rounds_away_fails(make_engine: Make, batch: Batch) -> None:
    engine = make_engine(lr=1e-30)
    assert any("get a gradient and do not move" in f.meaning for f in en.prove(engine, GRPO(clip=0.2), batch).failures)


def test_nothing_checked_is_not_a_pass() -> None:
    with pytest.raises(LawBroken, match="nothing was checked"):
        en.Verdict(()).raise_if_failed()

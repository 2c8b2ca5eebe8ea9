"""A term that is inactive by design where training begins (a barrier below its τ, a KL at its reference) is not broken:
it is judged in a state in which it is active, and the engine is restored. A broken term fails there, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import earnest as en
from earnest.engines import AdamW, LocalEngine
from earnest.objectives import Objective
from earnest.objectives.base import Value
from earnest.objectives.view import View
from earnest.proving import step_of
from earnest.proving.proof import activation, inactive
from tests.engines.conftest import tiny_policy
from tests.proving.test_objectives_and_adapters import batch_of, engine_of


def initial() -> LocalEngine:
    """B = 0: the policy is its reference."""
    policy = tiny_policy(torch.float32, 0)
    return LocalEngine(policy, en.attach(policy, en.LoRA(), targets="all-linear", seed=0), AdamW(lr=1e-2))


INACTIVE = {
    "a barrier below its τ": (initial, en.GRPO(clip=0.2) + en.KLBarrier(tau=0.3)),
    "a barrier alone": (initial, Objective.of(en.KLBarrier(tau=0.3))),
    "a trained policy within τ": (lambda: engine_of(torch.float32, 0), en.GRPO(clip=0.2) + en.KLBarrier(tau=50.0)),
    "a cap above every singular value": (initial, en.SFT() + en.SpectralCap(cap=1.0)),
}


@pytest.mark.parametrize("name", INACTIVE)
def test_an_inactive_term_is_judged_where_it_is_active(name: str) -> None:
    make, objective = INACTIVE[name]
    engine = make()
    batch = batch_of(engine, 0)
    (label,) = inactive(engine, objective, batch)
    held = [p.detach().clone() for p in engine.parameters]
    verdict = en.prove(engine, objective, batch)
    assert verdict.holds, str(verdict)
    (row,) = (f for f in verdict.findings if f.law == "GL" and f.subject == f"term {label}" and "norm" in f.measured)
    assert "inactive at first" in row.measured
    assert any(note.startswith(f"{label} is inactive") for note in verdict.notes)
    assert all(torch.equal(p, q) for p, q in zip(held, engine.parameters, strict=True))


def test_a_threshold_alone_is_moved_where_that_is_enough() -> None:
    engine = engine_of(torch.float32, 0)
    batch = batch_of(engine, 0)
    held = [p.detach().clone() for p in engine.parameters]
    barrier = Objective.of(en.KLBarrier(tau=50.0))
    found = activation(engine, barrier, batch, step_of(engine, barrier, batch))
    assert all(torch.equal(p, q) for p, q in zip(held, engine.parameters, strict=True))
    assert found is not None and found.perturb == 0
    tau = found.settings["kl_barrier.tau"]
    assert 0 < tau < 50 and found.terms == {"kl_barrier": f"with tau = {tau:.3g}"}


@dataclass(frozen=True, kw_only=True)
class Cut(en.KLBarrier):
    """Its divergence carries no gradient."""

    def evaluate(self, view: View) -> Value:
        found = super().evaluate(view)
        return replace(found, loss=found.loss.detach() + 0 * view.scalar(self.need).sum())


def test_a_barrier_without_a_gradient_fails_although_it_may_be_inactive() -> None:
    engine = initial()
    verdict = en.prove(engine, en.GRPO(clip=0.2) + Cut(tau=0.3), batch_of(engine, 0), quick=True)
    assert [f.subject for f in verdict.failures] == ["term kl_barrier"]


def test_active_terms_are_left_alone() -> None:
    engine = engine_of(torch.float32, 0)
    objective = en.GRPO(clip=0.2) + en.KLBarrier(tau=0.01)
    batch = batch_of(engine, 0)
    assert activation(engine, objective, batch, step_of(engine, objective, batch)) is None

"""A term that sleeps by design where training begins (a barrier below its τ, a KL at its reference) is no broken one:
it is woken, judged, and put back. A broken one fails all the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import earnest as en
from earnest.audit.alive import prove_alive
from earnest.audit.awake import asleep, awake
from earnest.engines import AdamW, LocalEngine
from earnest.objectives import Objective
from earnest.objectives.base import Value
from earnest.objectives.view import View
from tests.audit.test_own import batch_of, engine_of
from tests.engines.conftest import tiny_policy


def newborn() -> LocalEngine:
    """B = 0: the policy is its reference."""
    policy = tiny_policy(torch.float32, 0)
    return LocalEngine(policy, en.attach(policy, en.LoRA(), targets="all-linear", seed=0), AdamW(lr=1e-2))


SLEEPERS = {
    "a barrier below its τ": (newborn, en.GRPO(clip=0.2) + en.KLBarrier(tau=0.3)),
    "a barrier alone": (newborn, Objective.of(en.KLBarrier(tau=0.3))),
    "a trained policy within τ": (lambda: engine_of(torch.float32, 0), en.GRPO(clip=0.2) + en.KLBarrier(tau=50.0)),
    "a cap above every singular value": (newborn, en.SFT() + en.SpectralCap(cap=1.0)),
}


@pytest.mark.parametrize("name", SLEEPERS)
def test_what_sleeps_is_woken_and_put_back(name: str) -> None:
    make, objective = SLEEPERS[name]
    engine = make()
    batch = batch_of(engine, 0)
    (label,) = asleep(engine, objective, batch)
    held = [p.detach().clone() for p in engine.parameters]
    verdict = en.prove(engine, objective, batch)
    assert verdict.holds, str(verdict)
    (row,) = (f for f in verdict.findings if f.law == "GL" and f.subject == f"term {label}" and "norm" in f.measured)
    assert "asleep at first" in row.measured
    assert any(note.startswith(f"{label} sleeps") for note in verdict.notes)
    assert all(torch.equal(p, q) for p, q in zip(held, engine.parameters, strict=True))


def test_a_threshold_alone_is_moved_where_that_is_enough() -> None:
    engine = engine_of(torch.float32, 0)
    batch = batch_of(engine, 0)
    held = [p.detach().clone() for p in engine.parameters]
    with awake(engine, Objective.of(en.KLBarrier(tau=50.0)), batch) as woken:
        assert all(torch.equal(p, q) for p, q in zip(held, engine.parameters, strict=True))
        (barrier,) = (w.term for w in woken.objective.terms)
        assert 0 < barrier.tau < 50 and woken.how == {"kl_barrier": f"with tau = {barrier.tau:.3g}"}  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Cut(en.KLBarrier):
    """Its divergence carries no gradient."""

    def evaluate(self, view: View) -> Value:
        found = super().evaluate(view)
        return replace(found, loss=found.loss.detach() + 0 * view.scalar(self.need).sum())


def test_a_dead_barrier_does_not_pass_for_a_sleeping_one() -> None:
    engine = newborn()
    verdict = prove_alive(engine, en.GRPO(clip=0.2) + Cut(tau=0.3), batch_of(engine, 0))
    assert [f.subject for f in verdict.failures] == ["term kl_barrier"]


def test_what_does_not_sleep_is_not_touched() -> None:
    engine = engine_of(torch.float32, 0)
    objective = en.GRPO(clip=0.2) + en.KLBarrier(tau=0.01)
    with awake(engine, objective, batch_of(engine, 0)) as woken:
        assert woken.objective is objective and not woken.how

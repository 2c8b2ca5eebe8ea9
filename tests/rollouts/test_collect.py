"""``en.collect``: a batch with everything that an objective reads, from the same code as a run's steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import earnest as en
from earnest.config import from_mapping
from earnest.errors import SignalError
from earnest.objectives import OBJECTIVES, Objective
from earnest.objectives.policy_gradient import PolicyGradient
from earnest.rollouts.rows import Row
from earnest.runs.collect import BatchSource
from earnest.runs.setup import build
from earnest.seeds import derive
from earnest.signals.advantages import Estimator
from earnest.tasks import PromptStream

SPEC = en.SampleSpec(max_new_tokens=8, seed=3)


@pytest.fixture(scope="module")
def engine() -> en.LocalEngine:
    policy = en.load("nano")
    return en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), targets=("q_proj",), seed=0))


TASK = en.get_task("sort")
PROMPTS = TASK.prompts("train", 4, 0)

MORE = {
    "route": en.GRPO(route="correct") + en.SDPO(route="failed"),
    "correction": en.GRPO(correction=en.TruncatedIS()),
    "importance": en.SDPO(importance_clip=2.0),
    "previous": en.KLBarrier(reference="previous"),
    "everything": en.GRPO() + en.SFT() + en.SDPO() + en.DPO() + en.ReferenceKL() + en.EntropyBonus(),
}


@pytest.mark.parametrize("kind", [*sorted(OBJECTIVES), *MORE])
def test_every_objective_can_be_stepped_right_after_collecting(engine: en.LocalEngine, kind: str) -> None:
    """DrGRPO, RLOO and route='correct' refused collected batches; SDPO, DPO, SFT and references had no supplier."""
    objective = MORE[kind] if kind in MORE else OBJECTIVES[kind].example()
    found = en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=objective)
    report = engine.step(found.batch, objective)
    assert set(report.terms) == {w.term.label for w in Objective.of(objective).live()} and not report.idle


def test_advantages_correct_answers_and_the_longest_completion_come_with_every_batch(engine: en.LocalEngine) -> None:
    plain = en.collect(engine, TASK, PROMPTS, 4, SPEC)
    assert plain.batch.estimator == "group" and plain.batch.max_length == 8
    assert plain.batch.correct is not None
    assert plain.batch.correct.tolist() == [g.correct for g in plain.grades]
    assert en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=en.RLOO()).batch.estimator == "leave_one_out"
    assert en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=en.DrGRPO()).batch.estimator == "none"
    assert en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=en.GRPO(), estimator="batch").batch.estimator == "batch"
    both = en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=en.DrGRPO() + en.RLOO())
    assert both.batch.estimator == "leave_one_out"
    with pytest.raises(SignalError, match=r"rloo: is defined with advantages by leave_one_out.*objective=objective"):
        engine.step(plain.batch, en.RLOO())


@pytest.mark.parametrize("number", [0, 2])
def test_demonstrations_are_groups_of_their_own_of_this_policy(engine: en.LocalEngine, number: int) -> None:
    """Those of the task and those that are given do not join the group of a rollout."""
    given = [Row("demonstration", (5, 6), (7, 8), group=0, policy_version=-1) for _ in range(number)]
    batch = en.collect(engine, TASK, PROMPTS[:2], 2, SPEC, objective=en.GRPO() + en.SFT(), given=given).batch
    assert batch.group.tolist() == [0, 0, 1, 1, 2, 3]
    assert set(batch.policy_version.tolist()) == {engine.version}


@dataclass(frozen=True, kw_only=True)
class Grouped(PolicyGradient):
    kind: ClassVar[str] = "grouped"
    estimators: ClassVar[tuple[Estimator, ...]] = ("group",)


def test_terms_that_are_defined_with_different_advantages_share_no_batch(engine: en.LocalEngine) -> None:
    with pytest.raises(SignalError, match="different advantages"):
        en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=Grouped() + en.RLOO())


def test_a_demonstration_needs_no_rollouts_and_its_reward_is_unknown(engine: en.LocalEngine) -> None:
    found = en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=en.SFT())
    assert found.attempts == () and set(found.batch.role) == {"demonstration"} and found.reward != found.reward


def test_a_run_collects_what_collect_collects() -> None:
    """The same prompts, seeds and objective give the same batch, signals included."""
    settings = {
        "task": "sort",
        "objective": [{"kind": "grpo"}, {"kind": "sdpo"}, {"kind": "dpo"}, {"kind": "sft"}],
        "adapter": {"kind": "lora", "rank": 2},
        "sampling": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_new_tokens": 8},
        "steps": 1,
    }
    setup = build(from_mapping(settings), lambda _: None)
    own = BatchSource(setup).next(1)
    prompts = PromptStream(setup.task, derive(0, "train") % 2**31).next(3)
    spec = en.SampleSpec(max_new_tokens=8, seed=derive(0, "train sampling", 1))
    other = en.collect(setup.engine, setup.task, prompts, 4, spec, objective=setup.objective)
    assert own.texts == other.texts and own.metrics == other.metrics
    for name in (f.name for f in fields(en.Batch)):
        a, b = getattr(own.batch, name), getattr(other.batch, name)
        if isinstance(a, Tensor):
            assert torch.equal(a, b), name
        elif name == "teacher":
            assert torch.equal(a.distribution.states, b.distribution.states) and torch.equal(a.at, b.at)
        elif name == "reference":
            assert torch.equal(a.logprobs, b.logprobs)
        else:
            assert a == b, name


def test_a_printed_batch_tells_its_rows_tokens_and_signals(engine: en.LocalEngine) -> None:
    found = en.collect(engine, TASK, PROMPTS, 4, SPEC, objective=en.GRPO() + en.ReferenceKL() + en.SFT())
    shown = repr(found.batch)
    assert shown.startswith(f"Batch(20 rows: 16 rollout, 4 demonstration; {found.batch.active.shape[0]} active of")
    assert "signals: advantages (group), behaviour, reference.logprobs, correct" in shown
    assert "temperature 1, on cpu" in shown and "tensor" not in shown
    assert repr(found).startswith(f"Rollouts(16 rollouts, reward {found.reward:.3f}, batch=Batch(")


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 3}])
def test_a_ratio_to_a_cut_distribution_is_refused(cut: dict[str, float]) -> None:
    """With top-p 0.7 the sampler's log-probs are of fewer tokens, so on-policy ratios are 0.6 to 0.7 instead of 1."""
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2)))
    task = en.get_task("sort")
    spec = en.SampleSpec(max_new_tokens=8, **cut)  # type: ignore[arg-type]
    batch = en.collect(engine, task, task.prompts("train", 2, seed=0), 4, spec).batch
    for term in (en.GRPO(), en.CISPO()):
        with pytest.raises(SignalError, match="top_p or top_k cut that policy's tokens"):
            Objective.of(term).check(batch)
    engine.step(batch, en.Reinforce())

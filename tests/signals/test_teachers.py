"""Teachers and references on a real (tiny, float64) model with a perturbed adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import earnest as en
from earnest.engines import AdamW, LocalEngine
from earnest.errors import SignalError
from earnest.objectives import DPO, GRPO, SDPO, TAID, KLBarrier, Objective, ReferenceKL, TruncatedIS
from earnest.signals import (
    BaseTeacher,
    Batch,
    EMATeacher,
    FullLogits,
    Hidden,
    LiveTeacher,
    TrustRegionTeacher,
    with_reference,
    with_teacher,
)
from earnest.signals.scorer import HiddenWanted
from tests.engines.conftest import perturb, tiny_policy

PROMPTS = [[3, 4], [3, 4], [5, 6, 7]]
COMPLETIONS = [[8, 9, 10], [11], [12, 13]]
TOLD = [[3, 4, 20, 21, 22], None, [5, 6, 7, 23]]


def engine_with(variant: object = None, *, biases: bool = False, **more: object) -> LocalEngine:
    policy = tiny_policy()
    for name, layer in policy.model.named_modules():
        if biases and name.endswith(("q_proj", "v_proj")):
            bias = torch.linspace(-1, 1, layer.out_features, dtype=torch.float64)
            layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    adapter = en.attach(policy, variant or en.LoRA(rank=3), targets=("q_proj", "v_proj"), seed=0)  # type: ignore[arg-type]
    perturb(adapter)
    return LocalEngine(policy, adapter, AdamW(lr=1e-2), **more)  # type: ignore[arg-type]


def rollouts(**more: object) -> Batch:
    behaviour = [[-3.0] * len(c) for c in COMPLETIONS]
    made = Batch.from_rows(PROMPTS, COMPLETIONS, group=[0, 0, 1], behaviour=behaviour, advantages=[1.0, -1.0, 0.5])
    return made.with_signals(**more)


def states(batch: Batch) -> Tensor:
    assert batch.teacher is not None and isinstance(batch.teacher.distribution, Hidden)
    return batch.teacher.distribution.states


def hidden_of(engine: LocalEngine, prompt: list[int], completion: list[int], policy: str = "live") -> Tensor:
    """The states before each completion token of one row, computed alone."""
    found = engine.score(Batch.from_rows([prompt], [completion]), HiddenWanted(), policy)  # type: ignore[arg-type]
    assert isinstance(found, Hidden)
    return found.states


# --- teachers ------------------------------------------------------------------------------------------------------


def test_the_teacher_reads_the_feedback_conditioned_prompt_and_aligns_with_the_students_tokens() -> None:
    """Rows 0 and 2 have lessons: tokens 0-2 and 4-5. Each state equals that of the row with its feedback-conditioned
    prompt, computed alone."""
    engine = engine_with()
    batch = with_teacher(engine, rollouts(), TOLD)
    assert batch.teacher is not None and batch.teacher.at is not None
    assert batch.teacher.at.tolist() == [0, 1, 2, 4, 5] and batch.teacher.kind == "live"
    alone = torch.cat([hidden_of(engine, TOLD[r], COMPLETIONS[r]) for r in (0, 2)])  # type: ignore[arg-type]
    torch.testing.assert_close(states(batch), alone)
    without_feedback = torch.cat([hidden_of(engine, PROMPTS[r], COMPLETIONS[r]) for r in (0, 2)])
    assert (states(batch) - without_feedback).abs().max() > 1e-3, "the feedback changes the states"


def test_holes_in_the_mask_are_holes_of_the_teacher() -> None:
    engine = engine_with()
    weight = rollouts().weight.clone()
    weight[0, 2] = 0.0  # the second token of row 0
    batch = Batch.from_rows(PROMPTS, COMPLETIONS).with_signals(weight=weight)
    made = with_teacher(engine, batch, TOLD)
    assert made.teacher is not None and made.teacher.at is not None and made.teacher.at.tolist() == [0, 1, 3, 4]
    torch.testing.assert_close(states(made), states(with_teacher(engine, rollouts(), TOLD))[[0, 2, 3, 4]])


def test_base_and_live_and_between() -> None:
    engine = engine_with()
    live, base = (states(with_teacher(engine, rollouts(), TOLD, t)) for t in (LiveTeacher(), BaseTeacher()))
    assert (live - base).abs().max() > 1e-3
    between = states(with_teacher(engine, rollouts(), TOLD, TrustRegionTeacher(mix=0.3)))
    head = engine.policy.head
    torch.testing.assert_close(head.logits(between), 0.7 * head.logits(base) + 0.3 * head.logits(live))
    for mix, other in ((0.0, base), (1.0, live)):
        torch.testing.assert_close(states(with_teacher(engine, rollouts(), TOLD, TrustRegionTeacher(mix=mix))), other)
    with pytest.raises(SignalError, match="mix"):
        TrustRegionTeacher(mix=1.5)


def test_a_step_moves_the_live_teacher_and_not_the_base() -> None:
    """The reference must not follow the policy (a PEFT adapter injected in place made a KL always 0 elsewhere)."""
    engine = engine_with()
    before = {t.kind: states(with_teacher(engine, rollouts(), TOLD, t)) for t in (LiveTeacher(), BaseTeacher())}
    engine.step(rollouts(), GRPO())
    after = {t.kind: states(with_teacher(engine, rollouts(), TOLD, t)) for t in (LiveTeacher(), BaseTeacher())}
    assert torch.equal(before["base"], after["base"]) and (before["live"] - after["live"]).abs().max() > 1e-4


def test_an_adapter_on_the_head_is_off_in_the_base() -> None:
    """Hidden states would be used with the wrong head, so the distribution is logits of the head without its
    adapter."""
    policy = tiny_policy()
    untouched = policy.head.weight.detach().clone()
    adapter = en.attach(policy, en.LoRA(rank=2), targets=("lm_head",), seed=0)
    perturb(adapter)
    engine = LocalEngine(policy, adapter, AdamW(lr=1e-2))
    live, base = (with_teacher(engine, rollouts(), TOLD, t).teacher for t in (LiveTeacher(), BaseTeacher()))
    assert live is not None and base is not None
    assert isinstance(live.distribution, FullLogits) and isinstance(base.distribution, FullLogits)
    states_now = torch.cat([hidden_of(engine, TOLD[r], COMPLETIONS[r]) for r in (0, 2)])  # type: ignore[arg-type]
    torch.testing.assert_close(base.distribution.logits, states_now @ untouched.T)
    assert (live.distribution.logits - base.distribution.logits).abs().max() > 1e-2


def test_without_any_lesson_the_term_is_idle_and_listed() -> None:
    engine = engine_with()
    batch = with_teacher(engine, rollouts(), [None] * 3)
    objective = GRPO() + SDPO(top_k=5)
    assert objective.idle(batch) == {"sdpo": "the teacher covers none of its tokens"}
    report = engine.step(batch, objective, shares=True)
    assert "grpo" in report.terms and "sdpo" not in report.terms
    assert report.idle == {"sdpo": "the teacher covers none of its tokens"}
    with pytest.raises(ValueError, match="covers none"):
        engine.step(batch, SDPO())


def test_wrong_lessons_are_refused() -> None:
    engine = engine_with()
    with pytest.raises(SignalError, match="each of 3 rows"):
        with_teacher(engine, rollouts(), [None])
    with pytest.raises(SignalError, match="row 1: its feedback-conditioned prompt is empty"):
        with_teacher(engine, rollouts(), [None, [], None])


def test_sdpo_trains_towards_the_teacher_end_to_end() -> None:
    """Steps on one batch with a fixed teacher bring the divergence down, wrapped or not, in uneven parts too."""
    for term in (SDPO(top_k=8, importance_clip=None), SDPO(support="full", importance_clip=None, wrap=TAID(steps=5))):
        engine = engine_with(micro_tokens=7)
        batch = with_teacher(engine, rollouts(), TOLD, BaseTeacher())
        reports = [engine.step(batch, term) for _ in range(12)]
        probe = "divergence"
        assert reports[0].micro_batches > 1
        if term.wrap is None:
            assert reports[-1].terms["sdpo"].metrics[probe] < 0.8 * reports[0].terms["sdpo"].metrics[probe]
        else:
            assert reports[-1].terms["sdpo"].metrics["taid_t"] == 1.0 and engine.objective_state["sdpo"]["step"] == 12


@pytest.mark.parametrize("term", [SDPO(top_k=8), SDPO(support="full"), KLBarrier(tau=0.0), DPO()], ids=lambda t: t.kind)
def test_micro_batches_give_the_whole_batchs_gradient(term: object) -> None:
    small, whole = engine_with(micro_tokens=5), engine_with()
    batch = with_teacher(whole, rollouts(), TOLD)
    if isinstance(term, DPO):
        batch = replace(batch, role=("chosen", "rejected", "rollout"), pair=torch.tensor([0, 0, -1]))
    batch = with_reference(whole, batch, term)  # type: ignore[arg-type]
    a, b = small.gradients(batch, term), whole.gradients(batch, term)  # type: ignore[arg-type]
    assert max(g.abs().max() for g in b.values()) > 1e-6
    for name, grad in b.items():
        torch.testing.assert_close(a[name], grad, rtol=1e-4, atol=1e-7)  # parameters are float32


# --- ema ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [en.LoRA(rank=3), en.DoRA(rank=2), en.IA3()], ids=lambda v: v.name)
def test_the_ema_averages_delta_w(variant: object) -> None:
    """After each update Δ̄ = (1-r)Δ̄ + rΔW, compared with an average computed here; the teacher scores with it."""
    engine = engine_with(variant)
    teacher = EMATeacher(engine.adapter, rate=0.25)
    engine.outer = teacher
    mine = {path: d.clone() for path, d in engine.adapter.deltas()}
    for _ in range(3):
        report = engine.step(rollouts(), GRPO())
        assert report.update.outer["ema_rate"] == 0.25
        mine = {path: 0.75 * mine[path] + 0.25 * d for path, d in engine.adapter.deltas()}
    for path, delta in mine.items():
        torch.testing.assert_close(teacher.state[f"{path}.weight"], delta, rtol=1e-4, atol=1e-6)
    live, base, ema = (
        states(with_teacher(engine, rollouts(), TOLD, t)) for t in (LiveTeacher(), BaseTeacher(), teacher)
    )
    assert (ema - live).abs().max() > 1e-4 and (ema - base).abs().max() > 1e-4


def test_a_delta_below_the_rounding_of_the_weights_is_averaged() -> None:
    """ΔW of a low-rank adapter comes from its factors, not from a difference of two rounded weights."""
    engine = engine_with()
    with torch.no_grad():
        for name, p in engine.adapter.named_parameters().items():
            if name.endswith("B"):
                p.mul_(1e-6)
    teacher = EMATeacher(engine.adapter, rate=0.25)
    for path, delta in engine.adapter.deltas():
        assert 0 < float(delta.abs().max()) < 1e-5
        torch.testing.assert_close(teacher.state[f"{path}.weight"], delta, rtol=1e-4, atol=0)


def test_an_average_at_rate_1_is_the_live_policy() -> None:
    """The hooks compute what the adapter computes: at r = 1 the teacher is the live policy, biases included."""
    for variant in (en.LoRA(rank=3), en.DoRA(rank=2), en.IA3(), en.HRA(rank=2)):
        engine = engine_with(variant, biases=True)
        teacher = EMATeacher(engine.adapter, rate=1.0)
        engine.outer = teacher
        engine.step(rollouts(), GRPO())
        live, ema = (states(with_teacher(engine, rollouts(), TOLD, t)) for t in (LiveTeacher(), teacher))
        torch.testing.assert_close(ema, live, rtol=1e-4, atol=1e-5)


def test_averaging_the_factors_would_be_another_teacher() -> None:
    """Why the average is on ΔW: (EMA A)(EMA B) ≠ EMA(AB)."""
    engine = engine_with()
    first = {n: p.detach().clone() for n, p in engine.adapter.named_parameters().items()}
    teacher = EMATeacher(engine.adapter, rate=0.5)
    engine.outer = teacher
    for _ in range(4):
        engine.step(rollouts(), GRPO())
    path = next(iter(engine.adapter.slots))
    average = {
        n: 0.5 * first[n] + 0.5 * p.detach() for n, p in engine.adapter.named_parameters().items() if n.startswith(path)
    }
    slot = engine.adapter.slots[path]
    tensors = slot.tensors | {n.rsplit(".", 1)[-1]: v for n, v in average.items()}
    of_factors = slot.variant.factors(tensors, slot.layer, 1.0).dense()
    assert (of_factors - teacher.state[f"{path}.weight"]).norm() > 0.01 * of_factors.norm()


def test_beyond_the_budget_the_average_is_compressed_and_reports_the_loss() -> None:
    """With rank enough it equals the dense average; with too little the residual is reported, and it is right."""
    engine = engine_with()
    dense = EMATeacher(engine.adapter, rate=0.3)
    roomy = EMATeacher(engine.adapter, rate=0.3, budget_bytes=0, rank=15)
    tight = EMATeacher(engine.adapter, rate=0.3, budget_bytes=0, rank=3)
    assert dense.form == "dense" and roomy.form == "re-compressed to rank 15"
    for _ in range(3):
        engine.step(rollouts(), GRPO())
        for teacher in (dense, roomy, tight):
            said = teacher.after_update(engine)
    a, b, c = (states(with_teacher(engine, rollouts(), TOLD, t)) for t in (dense, roomy, tight))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert roomy.residual < 1e-5 < said["ema_residual"] == tight.residual < 0.5
    assert (a - c).abs().max() > 1e-6
    with pytest.raises(SignalError, match="no low-rank form"):
        EMATeacher(engine_with(en.IA3()).adapter, budget_bytes=0)
    with pytest.raises(SignalError, match="rate"):
        EMATeacher(engine.adapter, rate=0.0)


def test_the_average_is_part_of_the_checkpoint(tmp_path: object) -> None:
    engine = engine_with()
    engine.outer = EMATeacher(engine.adapter, rate=0.2)
    engine.step(rollouts(), GRPO())
    engine.save(f"{tmp_path}/a")
    kept = states(with_teacher(engine, rollouts(), TOLD, engine.outer))
    other = engine_with()
    other.outer = EMATeacher(other.adapter, rate=0.2)
    other.load(f"{tmp_path}/a")
    assert torch.equal(states(with_teacher(other, rollouts(), TOLD, other.outer)), kept)
    with pytest.raises(SignalError, match="does not fit this average"):
        other.outer.load_state_dict({})


# --- references ------------------------------------------------------------------------------------------------------


def test_with_reference_adds_only_the_signals_that_live_terms_read() -> None:
    engine = engine_with()
    batch = rollouts()
    assert with_reference(engine, batch, GRPO()).reference is None
    assert with_reference(engine, batch, GRPO() + 0.0 * KLBarrier()).reference is None
    only = with_reference(engine, batch, GRPO() + ReferenceKL())
    assert only.reference is not None and only.reference.distribution is None and only.reference.logprobs is not None
    both = with_reference(engine, batch, ReferenceKL() + KLBarrier())
    assert both.reference is not None and both.reference.distribution is not None and both.reference.kind == "base"
    assert with_reference(engine, both, ReferenceKL() + KLBarrier()).reference == both.reference, "kept, not recomputed"
    proximal = with_reference(engine, batch, GRPO(correction=TruncatedIS())).proximal
    assert proximal is not None


def test_the_reference_is_the_gate_at_0_at_the_sampling_temperature() -> None:
    """At any temperature an unmoved policy has a KL of 0 to its reference and a ratio of 1 to itself."""
    engine = engine_with()
    batch = rollouts(temperature=0.6)
    objective = Objective.of(ReferenceKL()) + GRPO(correction=TruncatedIS())
    made = with_reference(engine, batch, objective)
    assert made.reference is not None and made.reference.logprobs is not None and made.proximal is not None
    perturbed = engine.step(made, objective).terms
    assert perturbed["reference_kl"].metrics["k2"] > 1e-4 and perturbed["grpo"].metrics["ratio"] == pytest.approx(1.0)
    with torch.no_grad():
        for p in engine.parameters:
            p.zero_()
    again = with_reference(engine, batch, objective)
    assert again.reference is not None and again.reference.logprobs is not None
    torch.testing.assert_close(again.reference.logprobs, made.reference.logprobs)
    assert engine.step(again, objective).terms["reference_kl"].metrics["k2"] == pytest.approx(0.0, abs=1e-15)

"""No false alarm on this project's own steps: every objective and every kind of adapter in fp32, some in bf16; all of
them in bf16, other settings of adapters and twenty seeds in the nightly target; sums, routes, corrections and
wrappers."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

import earnest as en
from earnest.adapters.cases import subjects
from earnest.adapters.variant import get_variant
from earnest.engines import AdamW, LocalEngine
from earnest.objectives import GRPO, Objective
from earnest.objectives.base import Signal, Term, Value
from earnest.objectives.metrics import Mean
from earnest.objectives.view import View
from earnest.proving import sharded, step_of
from earnest.proving.metrics import NARROW
from earnest.proving.proof import relevant
from earnest.proving.settings import rebuild
from earnest.proving.step import _batch, _data, _unique_pairs
from earnest.settings import setting
from earnest.signals import Batch, Reference, Teacher
from earnest.signals.scorer import HiddenWanted, LogProbsWanted
from earnest_audit import Metric
from tests.engines.conftest import VOCABULARY, perturb, tiny_policy
from tests.objectives.support import GROUPS, LENGTHS, PAIRS, ROLES, examples

DTYPES = (torch.float32, torch.bfloat16)
TERMS = list(examples())
VARIANTS = list(subjects())
KINDS = {kind: label for label, (kind, _) in reversed(subjects().items())}.values()
"""One label of each kind of adapter."""
IN_BF16 = ("grpo", "sdpo", "dpo", "reference_kl", "sft", "kl_barrier", "spectral_cap")
"""One term of each kind of loss; the others are nightly in bf16."""


def nightly(fast: bool) -> list[pytest.MarkDecorator]:
    return [] if fast else [pytest.mark.slow]


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def engine_of(dtype: torch.dtype, seed: int, adapter: str = "lora") -> LocalEngine:
    policy = tiny_policy(dtype, seed)
    kind, settings = subjects()[adapter]
    variant = get_variant(kind, **settings)
    calibration = [torch.arange(3, 40)[None]] if variant.wants_calibration() else None
    made = en.attach(policy, variant, targets="all-linear", calibration=calibration, seed=seed)
    perturb(made, seed + 1, size=0.1)
    return LocalEngine(policy, made, AdamW(lr=1e-2))


def batch_of(engine: LocalEngine, seed: int) -> Batch:
    """Every role and signal, each from the policy it would come from: a behaviour and a reference a perturbation
    away."""
    g = torch.Generator().manual_seed(seed + 50)
    prompts = [torch.randint(3, VOCABULARY, (2 + r % 3,), generator=g).tolist() for r in range(len(ROLES))]
    completions = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in LENGTHS]
    batch = Batch.from_rows(prompts, completions, role=ROLES, group=GROUPS, pair=PAIRS, max_length=7)
    live = engine.score(batch, LogProbsWanted())
    base = engine.score(batch, HiddenWanted(), policy="base")
    states = engine.score(batch, HiddenWanted())
    assert isinstance(live, torch.Tensor)
    N = len(live)
    near = [(live.double() + 0.2 * torch.randn(N, generator=g)).clamp(max=0).to(live.dtype) for _ in range(3)]
    rollouts = batch.has_role(("rollout",))[batch.row]
    at = (rollouts & (batch.row != 1)).nonzero()[:, 0]  # row 1 has no teacher
    told = states.states[at]  # type: ignore[union-attr]
    told = told + 0.3 * torch.randn(told.shape, generator=g).to(told.dtype)
    return batch.with_signals(
        advantages=batch.per_token(torch.randn(len(batch), generator=g)),
        behaviour=near[0],
        proximal=near[1],
        reference=Reference(near[2], base),  # type: ignore[arg-type]
        teacher=Teacher(en.Hidden(told), at, "live"),
        correct=torch.tensor([True, False, True, True, False] + [False] * 6),
        kl_baseline=torch.full((len(batch),), 0.2),
    )


@cache
def prepared(dtype: torch.dtype, seed: int) -> tuple[LocalEngine, Batch]:
    engine = engine_of(dtype, seed)
    return engine, batch_of(engine, seed)


def hold(engine: LocalEngine, objective: Objective, batch: Batch) -> None:
    alarms = alarmed("", engine, objective, batch)
    assert not alarms, "\n".join(alarms)


def alarmed(name: str, engine: LocalEngine, objective: Objective, batch: Batch) -> list[str]:
    verdict = en.prove(engine, objective, batch)
    assert any(f.outcome == "holds" for f in verdict.findings)
    return [f"{name}: {f.law} {f.subject}: {f.measured}, expected {f.expected}" for f in verdict.failures]


@pytest.mark.parametrize(
    ("kind", "dtype", "seed"),
    [
        *(pytest.param(kind, torch.float32, 0, id=f"{kind}-float32") for kind in TERMS),
        *(
            pytest.param(kind, torch.bfloat16, 1, id=f"{kind}-bfloat16", marks=nightly(kind in IN_BF16))
            for kind in TERMS
        ),
    ],
)
def test_every_objective(kind: str, dtype: torch.dtype, seed: int) -> None:
    hold(prepared(dtype, seed)[0], Objective.of(examples()[kind]), prepared(dtype, seed)[1])


SUMS: dict[str, Objective] = {
    "grpo, corrected": Objective.of(en.GRPO(clip=0.2, correction=en.TruncatedIS(cap=1.2))),
    # A threshold that some tokens' teachers are above and some below, or α would rightly do nothing.
    "distill, wrapped": Objective.of(en.Distill(wrap=en.EntropyAware(threshold=3.8))),
    "srpo": en.GRPO(clip=0.2, route="correct") + 0.5 * en.SDPO(top_k=4, route="failed"),
    "a barrier with a weight": en.GRPO(clip=0.2) + 0.5 * en.KLBarrier(tau=0.01, strength=2.0),
    "all four": en.GRPO(clip=0.2) + 0.5 * en.SDPO(top_k=4) + 0.1 * en.SimPO() + en.KLBarrier(tau=0.01),
    "sft + dpo": en.SFT() + 0.3 * en.DPO(),
    "grpo + sft": en.GRPO(clip=0.2) + 0.3 * en.SFT(),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_several_roles(name: str, seed: int) -> None:
    hold(prepared(torch.float32, seed)[0], SUMS[name], prepared(torch.float32, seed)[1])


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("adapter", [pytest.param(name, marks=nightly(name in KINDS)) for name in VARIANTS])
def test_every_adapter(adapter: str, dtype: torch.dtype) -> None:
    engine = engine_of(dtype, 1, adapter)
    hold(engine, Objective.of(GRPO(clip=0.2)), batch_of(engine, 1))


# --- what earnest knows of itself -------------------------------------------------------------------------------------


def test_a_barriers_own_strength_is_not_its_weight_in_a_sum() -> None:
    """λ = 2 and a weight of 0.5 are two settings, and turning one leaves the other."""
    engine, batch = prepared(torch.float32, 0)
    alone = step_of(engine, en.KLBarrier(tau=0.01, strength=2.0), batch)
    assert alone.knobs["kl_barrier.strength"] == 2.0 and "kl_barrier.weight" not in alone.knobs
    assert not alone.weighed and not alone.terms_off, "a single term has no weight to turn"
    objective = SUMS["a barrier with a weight"]
    step = step_of(engine, objective, batch)
    assert step.knobs["kl_barrier.weight"] == 0.5 and step.knobs["kl_barrier.strength"] == 2.0
    assert step.weighed == {"grpo": "grpo.weight", "kl_barrier": "kl_barrier.weight"}
    assert list(step.terms_off) == ["kl_barrier.weight"] == list(step.weights.values())
    turned = rebuild(objective, {**step.knobs, "kl_barrier.strength": 3.0})
    weighted = next(w for w in turned.terms if w.term.label == "kl_barrier")
    assert weighted.weight == 0.5 and weighted.term.strength == 3.0  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Heavy(en.GRPO):
    """A field that would hide the term's own weight."""

    weight: float = setting(1.0, "another weight", above=0.0)


def test_a_field_called_weight_is_refused() -> None:
    with pytest.raises(AssertionError, match="would hide the term's own"):
        step_of(*prepared_with(Heavy()))


def prepared_with(term: Term) -> tuple[LocalEngine, Objective, Batch]:
    engine, batch = prepared(torch.float32, 0)
    return engine, Objective.of(term), relevant(Objective.of(term), batch)


def test_settings_metrics_and_signals_are_all_declared() -> None:
    corrected = step_of(*prepared_with(en.GRPO(clip=0.2, correction=en.TruncatedIS(cap=1.5))))
    assert {"grpo.clip", "grpo.correction.cap", "grpo.correction.floor"} == set(corrected.knobs)
    assert {"grpo.correction.level", "grpo.correction.mode"} <= set(corrected.options)
    assert {"behaviour", "proximal", "advantages"} <= set(corrected.roles)
    assert corrected.facts["clip_low"] == Metric(0.0, 1.0, moves=False, neutral=0.0)
    assert corrected.facts["ratio"] == Metric(0.0, neutral=1.0) and not corrected.facts["tokens"].moves
    narrow = step_of(*prepared_with(en.GRPO(clip=NARROW / 2)))
    assert narrow.facts["clip_low"].neutral is None, "rounding is clipped there"
    _, metrics = corrected.loss(corrected.model, corrected.batch, **corrected.knobs)
    assert {"grpo", "ratio", "behaviour_kl", "is_weight", "clip_high"} <= set(metrics)
    wrapped = step_of(*prepared_with(en.Distill(wrap=en.EntropyAware(threshold=1.2))))
    assert {"distill.wrap.threshold", "distill.wrap.forward_weight", "distill.normalised"} <= set(wrapped.knobs)
    assert "distill.wrap.temperature" not in wrapped.knobs, "a wrapper has no support of its own"
    sdpo = step_of(*prepared_with(en.SDPO(top_k=4, route="failed")))
    assert sdpo.knobs["sdpo.top_k"] == 4 and "correct" in sdpo.roles
    families = [step_of(*prepared_with(term)).family for term in (en.GRPO(), en.DPO(), en.SDPO(top_k=4), en.SFT())]
    assert families == ["policy gradient", "preference", "divergence", "sft"]


def test_a_batch_survives_its_way_through_a_dictionary() -> None:
    _, rows = prepared(torch.float32, 0)
    original = replace(rows, estimator="rloo", temperature=0.7, policy_version=torch.arange(len(rows)))
    again = _batch(original, _data(original)[0])
    tensors = ("inputs", "weight", "length", "group", "pair", "policy_version", "advantages", "behaviour", "proximal")
    for name in tensors:
        assert torch.equal(getattr(again, name), getattr(original, name)), name
    for name in ("role", "temperature", "max_length", "estimator"):
        assert getattr(again, name) == getattr(original, name), name


def test_a_copy_of_the_model_has_no_spectral_norm_of_its_own() -> None:
    engine, objective, rows = prepared_with(examples()["spectral_cap"])
    step = step_of(engine, objective, rows)
    step.loss(engine.policy.model, step.batch, **step.knobs)
    with pytest.raises(ValueError, match="the engine's own adapter"):
        step.loss(copy.deepcopy(engine.policy.model), step.batch, **step.knobs)


def test_pairs_that_are_repeated_get_numbers_of_their_own() -> None:
    roles = ["chosen", "rejected", "chosen", "chosen", "rejected", "rollout"]
    assert _unique_pairs(torch.tensor([0, 0, 1, 0, 0, -1]), roles).tolist() == [0, 0, 1, 2, 2, -1]


def test_the_ranks_of_one_process_are_checked_without_a_trace() -> None:
    engine, rows = prepared(torch.float32, 0)
    hooks = len(engine.policy.body._forward_pre_hooks)
    findings = sharded.check(engine, Objective.of(en.GRPO(clip=0.2)), rows, [])
    found = [next(findings), next(findings)]  # what comes after them updates the engine
    assert [f.outcome for f in found] == ["holds", "holds"], found
    assert len(engine.policy.body._forward_pre_hooks) == hooks


@dataclass(frozen=True, kw_only=True)
class OffByOne(en.GRPO):
    """Logs the ratio's mean plus one."""

    def evaluate(self, view: View) -> Value:
        found = super().evaluate(view)
        return replace(found, metrics={**found.metrics, "ratio": Mean(found.metrics["ratio"].value + 1, 1)})


@dataclass(frozen=True, kw_only=True)
class SharesOf(en.GRPO):
    """Logs a count where a share is meant."""

    def evaluate(self, view: View) -> Value:
        found = super().evaluate(view)
        return replace(found, metrics={**found.metrics, "clip_low": Mean(7.0, 1)})


@dataclass(frozen=True, kw_only=True)
class NoProximal(en.GRPO):
    """Asks for the trainer's log-probs at sampling time and reads none."""

    def signals(self) -> frozenset[Signal]:
        return super().signals() | {"proximal"}


@dataclass(frozen=True, kw_only=True)
class Unrouted(en.GRPO):
    """Asks which answers are right and trains on all."""

    def tokens(self, batch: Batch) -> torch.Tensor:
        return batch.has_role(self.roles)[batch.row]


@dataclass(frozen=True, kw_only=True)
class Uncapped(en.GRPO):
    """A correction whose cap nothing reads."""

    def evaluate(self, view: View) -> Value:
        assert self.correction is not None
        return en.GRPO(clip=self.clip, correction=replace(self.correction, cap=1e6)).evaluate(view)


@pytest.mark.parametrize(
    ("term", "law", "subject"),
    [
        (OffByOne(clip=0.2), "MR", "metric ratio, policy unchanged"),
        (SharesOf(clip=0.2), "MR", "metric clip_low"),
        (NoProximal(clip=0.2), "IG", "input proximal (proximal)"),
        (Uncapped(clip=0.2, correction=en.TruncatedIS(cap=1.5)), "KG", "setting grpo.correction.cap"),
        (Unrouted(clip=0.2, route="correct"), "IG", "input correct (correct)"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Term) else None,
)
def test_a_broken_term_is_seen_in_what_is_newly_known(term: Term, law: str, subject: str) -> None:
    verdict = en.prove(*prepared_with(term))
    assert (law, subject) in {(f.law, f.subject) for f in verdict.failures}, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_over_seeds(dtype: torch.dtype, seed: int) -> None:
    """All of it, every alarm listed."""
    engine = engine_of(dtype, seed)
    batch = batch_of(engine, seed)
    alarms = [a for kind, term in examples().items() for a in alarmed(kind, engine, Objective.of(term), batch)]
    for name, total in SUMS.items():
        if name != "distill, wrapped":  # its threshold has to fit the batch
            alarms += alarmed(name, engine, total, batch)
    for adapter in VARIANTS:
        other = engine_of(dtype, seed, adapter)
        alarms += alarmed(adapter, other, Objective.of(GRPO(clip=0.2)), batch_of(other, seed))
    assert not alarms, "\n".join(alarms)


def test_a_step_keeps_no_tensor() -> None:
    """The graph of a step is freed after it, whatever its objective: the number of live tensors stays the same."""
    engine = engine_of(torch.float32, 0)
    batch, terms = batch_of(engine, 0), examples().values()

    def live() -> int:
        for term in terms:
            engine.step(batch, term)
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    live()
    assert live() == live()

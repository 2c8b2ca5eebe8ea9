"""Every registered term: it has a gradient, combines with every other, uses each setting, and refuses wrong inputs."""

from __future__ import annotations

import itertools
from dataclasses import MISSING, fields, replace

import pytest
import torch

import earnest.objectives as objectives
from earnest.errors import EarnestError, ObjectiveError, SignalError
from earnest.objectives import (
    DPO,
    GRPO,
    OBJECTIVES,
    RLOO,
    SDPO,
    SFT,
    TAID,
    DrGRPO,
    EntropyAware,
    EntropyBonus,
    KLBarrier,
    Objective,
    SimPO,
    Term,
    TruncatedIS,
    build,
    build_objective,
    describe,
)
from earnest.objectives.needs import Divergence, LogProb
from earnest.objectives.view import Field
from earnest.settings import SettingSpec, settings
from earnest.signals import Batch
from tests.objectives.support import examples, full_batch

KINDS = sorted(OBJECTIVES)
EXPECTED = [
    "bnpo",
    "cispo",
    "dapo",
    "distill",
    "dpo",
    "dr_grpo",
    "entropy",
    "entropy_aware",
    "grpo",
    "gspo",
    "kl_barrier",
    "kto",
    "luspo",
    "reference_kl",
    "reinforce",
    "rloo",
    "sapo",
    "sdpo",
    "sft",
    "simpo",
    "spectral_cap",
    "taid",
]


def test_every_expected_term_is_registered() -> None:
    assert KINDS == EXPECTED


@pytest.mark.parametrize("kind", KINDS)
def test_a_term_alone_has_a_gradient_and_describes_what_ran(kind: str) -> None:
    batch, policy = full_batch()
    result = policy.evaluate(batch, examples()[kind])
    assert result.values[kind].ran
    assert policy.gradient(batch, examples()[kind]).abs().max() > 1e-4


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    batch, policy = full_batch()
    return {kind: policy.gradient(batch, term) for kind, term in examples().items()}


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(KINDS, 2)))
def test_in_a_pair_each_term_has_its_own_gradient_times_its_weight(
    one: str, two: str, alone: dict[str, torch.Tensor]
) -> None:
    batch, policy = full_batch()
    together = policy.gradient(batch, 0.7 * examples()[one] + (-1.3) * examples()[two])
    torch.testing.assert_close(together, 0.7 * alone[one] - 1.3 * alone[two], rtol=1e-9, atol=1e-12)


def test_a_sum_of_four_terms_runs_and_its_parts_add_up() -> None:
    batch, policy = full_batch()
    total = (
        GRPO(clip=0.2) + 0.5 * SDPO(alpha=0.5, top_k=4, wrap=TAID(t_start=0.5)) + 0.1 * SimPO() + KLBarrier(tau=0.01)
    )
    result = policy.evaluate(batch, total)
    assert list(result.values) == ["grpo", "sdpo", "simpo", "kl_barrier"]
    parts = [w.weight * result.values[w.term.label].loss for w in total.terms]
    torch.testing.assert_close(result.loss, torch.stack(parts).sum())


def test_yaml_builds_the_same_objective_as_python() -> None:
    python = (
        GRPO(clip=0.1, correction=TruncatedIS(cap=3.0, level="sequence"))
        + 0.5 * SDPO(alpha=1.0, wrap=TAID(t_start=0.3, steps=7))
        + 0.25 * SDPO(name="careful", wrap=EntropyAware(threshold=2.0))
        + 0.0 * SFT()
    )
    yaml = [
        {"kind": "grpo", "clip": 0.1, "correction": {"cap": 3.0, "level": "sequence"}},
        {"kind": "sdpo", "weight": 0.5, "alpha": 1.0, "wrap": {"kind": "taid", "t_start": 0.3, "steps": 7}},
        {"kind": "sdpo", "weight": 0.25, "name": "careful", "wrap": {"kind": "entropy_aware", "threshold": 2.0}},
        {"kind": "sft", "weight": 0.0},
    ]
    assert build_objective(yaml) == python


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "grppo"}, "did you mean 'grpo'"),
        ({"clip": 0.2}, "no kind"),
        ({"kind": "grpo", "clipp": 0.2}, "did you mean 'clip'"),
        ({"kind": "sdpo", "wrap": {"kind": "tiad"}}, "taid"),
        ({"kind": "sdpo", "wrap": {"kind": "taid", "t_strat": 0.1}}, "t_start"),
        ({"kind": "grpo", "correction": {"capp": 1.0}}, "cap"),
        ({"kind": "grpo", "weight": "a lot"}, "finite number"),
        ({"kind": "grpo", "weight": float("nan")}, "finite number"),
        ({"kind": "grpo", "name": ""}, "not empty"),
    ],
)
def test_a_wrong_entry_is_refused_with_the_way_out(entry: dict, words: str) -> None:
    with pytest.raises(EarnestError, match=words):
        build_objective([entry])
    with pytest.raises(ObjectiveError, match="no term"):
        build_objective([])


def _illegal(what: SettingSpec) -> list[object]:
    if what.choices:
        return ["nonsense", 3]
    if what.boolean:
        return ["yes", 1]
    if what.nested:
        return [3.0, "nonsense"]
    values: list[object] = ["1", True, float("nan"), float("inf")]
    if what.above is not None:
        values.append(what.above)
    if what.at_least is not None:
        values.append(what.at_least - 1)
    if what.below is not None:
        values.append(what.below)
    if what.at_most is not None:
        values.append(what.at_most + 1)
    return [*values, 1.5] if what.types == (int,) else values


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_refuses_values_outside_its_range(kind: str) -> None:
    """The message has the label, the field, the value and what is allowed."""
    for name, _, what in settings(OBJECTIVES[kind]):
        if name == "name":
            continue
        assert what.doc, f"{kind}.{name} has no meaning"
        for value in _illegal(what) + ([] if what.optional else [None]):
            for make in (build, lambda kind, **values: OBJECTIVES[kind](**values)):
                with pytest.raises(ObjectiveError) as caught:
                    make(kind, **{name: value})
                assert all(part in str(caught.value) for part in (kind, name, repr(value))), str(caught.value)


def test_contradictions_between_fields_are_refused() -> None:
    for make, words in [
        (lambda: GRPO(clip=0.2, dual_clip=1.1), "dual_clip"),
        (lambda: TruncatedIS(cap=1.0, floor=2.0), "floor"),
        (lambda: DPO(loss="ipo", smoothing=0.1), "smoothing"),
        (lambda: DPO(loss="robust"), "smoothing"),
        (lambda: SDPO(support="full", top_k=5), "top_k"),
        (lambda: SDPO(wrap=TAID(temperature=2.0)), "temperature on sdpo"),
        (lambda: TAID(t_start=0.9, t_end=0.5), "t_end"),
        (lambda: objectives.ReferenceKL(estimator="k1"), "cannot be a loss"),
        (lambda: objectives.ReferenceKL(estimator="k2", importance="attached"), "attached"),
        (lambda: GRPO() + GRPO(), "two terms are called 'grpo'"),
        (lambda: GRPO() * float("inf"), "finite"),
    ]:
        with pytest.raises(ObjectiveError, match=words):
            make()


def _pairs_of_values(kind: str, name: str, what: SettingSpec) -> list[dict[str, object]]:
    """Values of one setting (with what makes the term active) that must give different gradients."""
    if what.choices:
        if name == "tail":
            return [
                {"tail": t, "support": "student", "top_k": 4} | ({"alpha": 1.0} if kind in ("distill", "sdpo") else {})
                for t in what.choices
                if t != "unnormalised" or kind in ("distill", "sdpo")
            ]
        if name == "support":
            return [{"support": "full"}, {"support": "student", "top_k": 3}, {"support": "teacher", "top_k": 3}]
        if (kind, name) == ("kl_barrier", "reference"):
            return []  # the reference: a test below shows that a wrong one is refused
        if (kind, name) == ("dpo", "loss"):
            return [{"loss": "sigmoid"}, {"loss": "ipo"}, {"loss": "hinge"}, {"loss": "robust", "smoothing": 0.2}]
        if (kind, name) == ("reference_kl", "importance"):
            return [{"importance": c, "estimator": "k3"} for c in what.choices]
        if (kind, name) == ("reference_kl", "estimator"):
            return [{"estimator": "k2"}, {"estimator": "k3"}]  # straight_through shares k2's gradient: tested by itself
        if name == "level":
            return []  # the same gradient with one advantage per sequence; tested in test_policy_gradient
        return [{name: c} | ({"tau": 0.01} if kind == "kl_barrier" else {}) for c in what.choices]
    if what.nested:
        options: list[object] = [None]
        options += [TruncatedIS()] if name == "correction" else [TAID(t_start=0.3), EntropyAware(threshold=1.2)]
        return [{name: o} for o in options]
    if what.boolean:
        return [{name: False}, {name: True}]
    awake: dict[str, list[dict[str, object]]] = {
        "clip": [{"clip": 0.01}, {"clip": 0.5}],
        "clip_high": [{"clip_high": 0.01}, {"clip_high": 0.6}],
        "dual_clip": [{"clip": 0.05, "clip_high": 0.05, "dual_clip": 1.1}, {"clip": 0.05, "clip_high": 0.05}],
        "max_length": [{"max_length": 7}, {"max_length": 9}],
        "max_ratio": [{"max_ratio": 1.05}, {"max_ratio": 5.0}],
        "tau_positive": [{"tau_positive": 0.5}, {"tau_positive": 2.0}],
        "tau_negative": [{"tau_negative": 0.5}, {"tau_negative": 2.0}],
        "beta": [{"beta": 0.3}, {"beta": 1.0}],
        "desirable_weight": [{"desirable_weight": 0.5}, {"desirable_weight": 2.0}],
        "undesirable_weight": [{"undesirable_weight": 0.5}, {"undesirable_weight": 2.0}],
        "gamma": [{"gamma": 0.0}, {"gamma": 1.0}],
        "smoothing": [{"smoothing": 0.0}, {"smoothing": 0.3}],
        "tau": [{"tau": 0.0}, {"tau": 50.0}],
        "strength": [{"tau": 0.0, "strength": 1.0}, {"tau": 0.0, "strength": 2.0}],
        "growth": [],  # has an effect from the second round on; tested in test_trust
        "cap": [{"cap": 0.0}, {"cap": 1.0}],
        "top_k": [{"support": "student", "top_k": 2}, {"support": "student", "top_k": 6}],
        "temperature": [{"temperature": 1.0}, {"temperature": 2.5}],
        "alpha": [{"alpha": 0.0}, {"alpha": 0.3}, {"alpha": 1.0}],
        "importance_clip": [{"importance_clip": 0.9}, {"importance_clip": 3.0}, {"importance_clip": None}],
        "threshold": [{"threshold": 0.0}, {"threshold": 1.2}],
        "forward_weight": [{"threshold": 0.0, "forward_weight": 1.0}, {"threshold": 0.0, "forward_weight": 2.0}],
        "t_start": [{"t_start": 0.2}, {"t_start": 0.9}],
        "t_end": [],  # these four change t between updates; tested in test_distill
        "steps": [],
        "rate": [],
        "momentum": [],
    }
    return awake[name]


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_changes_the_gradient(kind: str) -> None:
    """Law KG, from off-policy states: each pair of settings differs on at least one of three batches."""
    batches = [full_batch(seed, perturb=0.8) for seed in range(3)]
    for name, _, what in settings(OBJECTIVES[kind]):
        if name == "name":
            continue
        options = _pairs_of_values(kind, name, what)
        grads = [torch.cat([p.gradient(b, build(kind, **o)) for b, p in batches]) for o in options]
        for (i, a), (j, b) in itertools.combinations(enumerate(grads), 2):
            gap = (a - b).abs().max() / max(a.abs().max(), b.abs().max())
            assert gap > 1e-3, f"{kind}: {options[i]} and {options[j]} have the same gradient"


@pytest.mark.parametrize("kind", KINDS)
def test_every_declared_signal_changes_the_gradient(kind: str) -> None:
    """Law IG: the gradient of a term depends on every signal that it declares (with importance and routing on)."""
    options: dict[str, dict[str, object]] = {
        "reference_kl": {"importance": "detached"},
        "sdpo": {"weighting": "success_variance", "route": "failed", "top_k": 4},
    }
    batch, policy = full_batch(perturb=0.4)
    term = replace(examples()[kind], **options.get(kind, {}))
    if kind in ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "luspo", "cispo", "sapo"):
        term = replace(term, correction=TruncatedIS(cap=1.0), route="failed")
        # wide clips: a clipped token correctly ignores small changes
        term = replace(term, **{k: 1.0 for k in ("clip", "clip_high") if hasattr(term, k)})
    before = policy.gradient(batch, term)
    for signal in term.signals():
        assert (policy.gradient(_perturbed(batch, signal), term) - before).abs().max() > 1e-6, (
            f"{kind} ignores {signal}"
        )


def _perturbed(batch: Batch, signal: str) -> Batch:
    g = torch.Generator().manual_seed(9)
    ref = batch.reference
    assert ref is not None and ref.logprobs is not None and batch.teacher is not None and batch.correct is not None
    noise = lambda like: 0.2 * torch.rand(like.shape, generator=g, dtype=torch.float64)  # noqa: E731
    if signal == "reference.logprobs":
        return batch.with_signals(reference=replace(ref, logprobs=ref.logprobs - noise(ref.logprobs)))
    if signal == "reference.distribution":
        states = ref.distribution.states  # type: ignore[union-attr]
        return batch.with_signals(reference=replace(ref, distribution=type(ref.distribution)(states + noise(states))))  # type: ignore[misc,call-arg]
    if signal == "teacher":
        states = batch.teacher.distribution.states  # type: ignore[union-attr]
        moved = type(batch.teacher.distribution)(states + noise(states))  # type: ignore[call-arg]
        return batch.with_signals(teacher=replace(batch.teacher, distribution=moved))
    if signal == "correct":
        return batch.with_signals(correct=batch.correct.roll(1))
    if signal == "advantages":  # one per sequence
        return batch.with_signals(advantages=batch.advantages + batch.per_token(noise(torch.zeros(len(batch)))))
    value = getattr(batch, signal)
    return batch.with_signals(**{signal: value - noise(value)})


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_signal_is_refused_by_name(kind: str) -> None:
    batch, policy = full_batch()
    term = examples()[kind]
    for signal in sorted(term.signals()):
        owner, _, part = signal.partition(".")
        absent = replace(getattr(batch, owner), **{part: None}) if part else None
        for value in (absent, None):
            with pytest.raises(SignalError, match=f"{kind}: needs the signal {signal!r}"):
                policy.evaluate(batch.with_signals(**{owner: value}), term)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_roles_are_refused_by_name(kind: str) -> None:
    batch, _ = full_batch()
    term = examples()[kind]
    others = [r for r, role in enumerate(batch.role) if role not in term.roles]
    if others:
        with pytest.raises(SignalError, match=f"{kind}: needs rows with role"):
            Objective.of(term).check(batch.rows(others))
    else:
        assert set(term.roles) == set(batch.role)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("breakage", "words"),
    [("nan", "not finite"), ("inf", "not finite"), ("shape", "nothing is broadcast|one value per")],
)
def test_a_broken_scalar_is_refused_by_name(kind: str, breakage: str, words: str) -> None:
    """NaN, inf, and a shape that torch would broadcast ([N,1] against [N] gives [N,N]) in each scalar it reads."""
    batch, policy = full_batch()
    objective = Objective.of(examples()[kind])
    state = objective.initial_state()
    needs = objective.needs(batch, state)
    for need in needs:
        found = policy.scalars(batch, needs)
        values = found[need].values.detach().clone()
        if breakage == "shape":
            values = values[:, None]
        else:
            values[..., :] = float(breakage)
        found[need] = replace(found[need], values=values)
        with pytest.raises(SignalError, match=f"^{kind}: .*({words})"):
            objective.evaluate(batch, found, state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_positive_log_prob_is_refused_by_name(kind: str) -> None:
    """One review found a loss tested on positive log-probabilities, which cannot occur: they are refused."""
    batch, policy = full_batch()
    objective = Objective.of(examples()[kind])
    state = objective.initial_state()
    needs = objective.needs(batch, state)
    for need in (n for n in needs if isinstance(n, LogProb)):
        found = policy.scalars(batch, needs)
        values = found[need].values.detach().clone()
        values[:] = 0.01
        found[need] = replace(found[need], values=values)
        with pytest.raises(SignalError, match=f"^{kind}: .*at most 0"):
            objective.evaluate(batch, found, state)
    for signal in ("behaviour", "reference.logprobs"):
        if signal not in examples()[kind].signals():
            continue
        broken, _ = full_batch()
        tensor = broken.behaviour if signal == "behaviour" else broken.reference.logprobs  # type: ignore[union-attr]
        assert tensor is not None
        tensor[3] = 0.7  # in place, after the constructor's check
        with pytest.raises(SignalError, match=f"^{kind}: the signal {signal!r}.*at most 0"):
            objective.check(broken)


def test_signals_are_checked_where_the_batch_is_made() -> None:
    batch, _ = full_batch()
    N = batch.active.shape[0]
    for name, value, words in [
        ("behaviour", torch.full((N,), 0.5), "at most 0"),
        ("behaviour", torch.full((N,), float("nan")), "not finite"),
        ("behaviour", torch.full((N, 1), -1.0), "shape|Type-check"),  # with the shape hook, jaxtyping raises first
        ("behaviour", torch.full((1,), -1.0), "shape|Type-check"),
        ("proximal", torch.full((N,), 0.5), "at most 0"),
        ("advantages", torch.full((N,), float("inf")), "not finite"),
        ("advantages", torch.zeros(len(batch)), "one value per active token|Type-check"),
    ]:
        with pytest.raises((SignalError, TypeError), match=words):
            batch.with_signals(**{name: value})
    with pytest.raises(SignalError, match="no active token"):
        batch.with_signals(
            weight=torch.zeros_like(batch.weight),
            advantages=None,
            behaviour=None,
            proximal=None,
            reference=None,
            teacher=None,
        )


def test_a_scalar_missing_from_the_engine_is_refused() -> None:
    batch, _ = full_batch()
    with pytest.raises(SignalError, match="grpo: the engine did not return"):
        Objective.of(GRPO()).evaluate(batch, {}, {})


def test_advantages_by_the_wrong_estimator_are_refused() -> None:
    batch, policy = full_batch()
    for term in (RLOO(), DrGRPO()):
        with pytest.raises(SignalError, match=f"{term.kind}: is defined with advantages by"):
            policy.evaluate(batch.with_signals(estimator="group"), term)
    policy.evaluate(batch.with_signals(estimator="leave_one_out"), RLOO())
    with pytest.raises(SignalError, match="dr_grpo: divides by the longest allowed completion"):
        policy.evaluate(batch.with_signals(max_length=None), DrGRPO())


def test_a_barrier_against_another_reference_is_refused() -> None:
    batch, policy = full_batch()
    with pytest.raises(SignalError, match="kl_barrier: uses the 'previous' policy"):
        policy.evaluate(batch, KLBarrier(reference="previous"))
    assert batch.reference is not None
    previous = batch.with_signals(reference=replace(batch.reference, kind="previous"))
    policy.evaluate(previous, KLBarrier(reference="previous"))
    with pytest.raises(SignalError, match="kl_barrier: uses the 'base' policy"):
        policy.evaluate(previous, KLBarrier())


def test_several_targets_per_position_are_only_for_sft() -> None:
    batch, _ = full_batch(holes=False)
    wide = Batch(
        **{f.name: getattr(batch, f.name) for f in fields(Batch) if f.name not in ("targets", "weight")},
        targets=batch.targets[..., None].expand(-1, -1, 2),
        weight=batch.weight[..., None].expand(-1, -1, 2),
    )
    Objective.of(SFT()).check(wide)
    for kind, term in examples().items():
        if kind != "sft":
            with pytest.raises(SignalError, match=f"{kind}: reads one target per position"):
                Objective.of(term).check(wide)


# --- weight 0, idle terms, state ------------------------------------------------------------------------------------


def test_a_term_with_weight_zero_is_not_computed_and_is_listed() -> None:
    batch, policy = full_batch()
    bare = batch.with_signals(reference=None)  # the barrier could not even be computed
    objective = GRPO() + 0.0 * KLBarrier()
    result = policy.evaluate(bare, objective)
    assert objective.skipped == ("kl_barrier",) and "kl_barrier" not in result.values
    assert not any(isinstance(n, Divergence) for n in objective.needs(bare, {}))
    with pytest.raises(ObjectiveError, match="nothing would be trained"):
        (0.0 * GRPO()).check(batch)


def test_objectives_add_up_as_numbers_do() -> None:
    """``a - b``, ``sum([a, b])``, ``-a`` and ``a / 2`` set the weights of the terms; other operands are refused by
    Python."""
    a, b = GRPO(), SFT()

    def weights(objective: Objective) -> dict[str, float]:
        return {w.term.kind: w.weight for w in objective.terms}

    assert weights(a - 0.5 * b) == {"grpo": 1.0, "sft": -0.5}
    assert weights((a + b) - EntropyBonus()) == {"grpo": 1.0, "sft": 1.0, "entropy": -1.0}
    assert weights(sum([a, 2 * b])) == {"grpo": 1.0, "sft": 2.0}  # type: ignore[arg-type]
    assert weights(-(a + b) / 4) == {"grpo": -0.25, "sft": -0.25}
    for wrong in (lambda: a + 1, lambda: 1 + a, lambda: a - 1, lambda: a * "2", lambda: sum([a, 1])):  # type: ignore[operator, list-item]
        with pytest.raises(TypeError):
            wrong()


def test_a_legitimately_idle_term_is_listed_with_its_reason() -> None:
    batch, policy = full_batch()
    assert batch.correct is not None
    solved = batch.with_signals(correct=torch.ones_like(batch.correct))
    result = policy.evaluate(solved, GRPO(route="correct") + SDPO(route="failed", top_k=4))
    assert result.idle == {"sdpo": "no failed rollout has a teacher"}
    with pytest.raises(ObjectiveError, match="no failed rollout has a teacher"):
        policy.evaluate(solved, SDPO(route="failed", top_k=4))


def test_a_part_without_any_of_the_rows_has_loss_and_gradient_zero() -> None:
    batch, policy = full_batch()
    objective = Objective.of(GRPO())
    whole = objective.counts(batch)
    pairs = [r for r, role in enumerate(batch.role) if role in ("chosen", "rejected")]
    part = batch.rows(pairs)
    index = torch.cat([(batch.row == r).nonzero()[:, 0] for r in pairs])
    result = objective.evaluate(part, policy.scalars(part, objective.needs(part, {}), index), {}, whole)
    (grad,) = torch.autograd.grad(result.loss, [policy.hidden])
    assert float(result.loss.detach()) == 0 and not grad.any() and result.idle


def test_state_is_kept_by_label_and_changes_only_when_the_term_ran() -> None:
    batch, policy = full_batch()
    objective = TAID(name="walk", steps=10) + KLBarrier(tau=0.01) + 0.0 * TAID(name="asleep")
    state = objective.initial_state()
    result = policy.evaluate(batch, objective, state)
    after = objective.advance(state, result.values)
    assert after["walk"]["step"] == 1 and after["asleep"]["step"] == 0 and state["walk"]["step"] == 0
    assert objective.next_round(after)["kl_barrier"] == {"round": 1}


# --- what people read -----------------------------------------------------------------------------------------------


def test_describe_lists_every_term_and_field() -> None:
    listed = {info.kind: info for info in describe()}
    assert sorted(listed) == KINDS
    for kind, cls in OBJECTIVES.items():
        info = listed[kind]
        assert info.paper and info.equation and info.summary and info.roles and info.cls == cls.__name__
        assert [f.name for f in info.fields] == [f.name for f in fields(cls) if f.name != "name"]
        assert all(f.doc and f.allowed for f in info.fields)
        assert getattr(objectives, info.cls) is cls, "public by its class name too"
    assert dict(listed["grpo"].more_signals)["proximal"] == "correction=TruncatedIS(…)"
    assert "correct" in dict(listed["sdpo"].more_signals) and "correct" not in listed["sdpo"].signals


@pytest.mark.parametrize("cls", [*OBJECTIVES.values(), TruncatedIS])
def test_every_field_is_a_setting_and_keyword_only(cls: type[Term]) -> None:
    for f in fields(cls):
        assert f.kw_only
        assert f.name == "name" or f.metadata["setting"].doc
        assert f.default is not MISSING, "every term can be made without arguments"


def test_a_field_of_another_shape_is_not_taken_for_a_scalar() -> None:
    batch, _ = full_batch()
    with pytest.raises(SignalError, match=r"grpo: LogProb.*must have shape"):
        Objective.of(GRPO()).evaluate(batch, {LogProb(): Field(torch.zeros(1))}, {})


PUBLISHED: dict[str, dict[str, float]] = {
    "cispo": {"max_ratio": 5.0},
    "dapo": {"clip": 0.2, "clip_high": 0.28},
    "dpo": {"beta": 0.1, "smoothing": 0.0},
    "dr_grpo": {"clip": 0.2},
    "entropy_aware": {"threshold": 0.8, "forward_weight": 1.0},
    "grpo": {"clip": 0.2},
    "gspo": {"clip": 3e-4, "clip_high": 4e-4},
    "kl_barrier": {"tau": 1.0, "strength": 1.0, "growth": 0.0},
    "luspo": {"clip": 3e-4, "clip_high": 4e-4},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "sdpo": {"alpha": 0.5, "temperature": 1.0, "importance_clip": 2.0},
    "simpo": {"beta": 2.0, "gamma": 0.5, "smoothing": 0.0},
    "spectral_cap": {"cap": 0.0},
    "taid": {"t_start": 0.4, "t_end": 1.0, "rate": 5e-4, "momentum": 0.99},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_defaults_are_the_published_ones(kind: str) -> None:
    """A run that sets nothing trains with these; no other test would detect a change of one of them."""
    given = {f.name: f.default for f in fields(OBJECTIVES[kind])}
    assert {name: given[name] for name in PUBLISHED[kind]} == PUBLISHED[kind]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_settings_have_names(kind: str) -> None:
    """A number without a name would be another setting after a field is added."""
    with pytest.raises(TypeError, match="positional argument"):
        OBJECTIVES[kind](0.5)  # type: ignore[call-arg]

"""``TinkerEngine`` through the real SDK and a real server, step by step beside ``LocalEngine`` on the same model."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, assert_never

import pytest
import torch
from torch import Tensor

import earnest as en
from earnest.engines import AtIdsWanted, LogitsWanted, LogProbsWanted, TopKWanted
from earnest.engines.tinker import RemoteSample, batch_of
from earnest.engines.tinker.teachers import MOST, SLOWEST, TOLERANCE
from earnest.engines.vocabulary import known
from earnest.engines.vocabulary.known import tail_of
from earnest.errors import CheckpointError, ConfigError, ObjectiveError, SignalError
from earnest.models import SampleSpec
from earnest.serve.tinker import samplers
from earnest.signals.batch import Reference
from earnest.signals.distributions import ScoredAt
from tests.tinker.conftest import KEY, Served
from tests.tinker.reference import close

ADAM = en.AdamW(lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class Pair:
    """The same LoRA twice: on the server, and here."""

    def __init__(self, served: Served, local: en.Policy, estimator: Any = "exact", **more: Any) -> None:
        self.remote = en.TinkerEngine(
            "earnest/nano", ADAM, base_url=served.url, api_key=KEY, rank=4, seed=7, estimator=estimator, **more
        )
        self.adapter = en.attach(local, en.LoRA(rank=4, alpha=32.0), targets=LAYERS, seed=7)
        self.local = en.LocalEngine(local, self.adapter, ADAM, estimator=estimator)
        self.there = served.adapter(self.remote.training)

    def moved(self) -> None:
        """Add the same noise on both sides."""
        g = torch.Generator().manual_seed(2)
        for (name, ours), theirs in zip(
            self.adapter.named_parameters().items(), self.there.named_parameters().values(), strict=True
        ):
            with torch.no_grad():
                if name.endswith("B"):
                    ours.copy_(0.03 * torch.randn(ours.shape, generator=g))
                theirs.copy_(ours)
        self.start = {n: p.detach().clone() for n, p in self.adapter.named_parameters().items()}

    def same_weights(self) -> None:
        """What training has moved since ``moved()``, on both sides."""
        ours = {n: p.detach() - self.start[n] for n, p in self.adapter.named_parameters().items()}
        theirs = {n: p.detach() - self.start[n] for n, p in self.there.named_parameters().items()}
        close(ours, theirs, 5e-3)

    def close(self) -> None:
        self.remote.close()  # its model leaves the server, which holds a limited number of them
        self.adapter.detach()


@pytest.fixture(scope="module")
def local() -> en.Policy:
    torch.set_num_threads(1)
    return en.load("nano")


@pytest.fixture
def pair(served: Served, local: en.Policy, request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = Pair(served, local, **getattr(request, "param", {}))
    made.moved()
    yield made
    made.close()


def _batch(pair: Pair) -> en.Batch:
    """Four rollouts of two prompts, with everything that an objective may read."""
    encode = pair.local.policy.encode
    prompts = [encode("Sort: c a b")] * 2 + [encode("What is 4 + 5?")] * 2
    answers = [encode(t) for t in (" a b c", " c b", " nine, I think", " 9")]
    batch = en.Batch.from_rows(
        prompts,
        answers,
        group=[0, 0, 1, 1],
        advantages=[1.0, -1.0, 0.5, -0.5],
        correct=[True, False, True, False],
    )
    lp = pair.local.score(batch, LogProbsWanted())
    assert isinstance(lp, Tensor)
    noise = torch.linspace(-0.3, 0.3, lp.shape[0])
    return batch.with_signals(behaviour=(lp + noise).clamp(max=0))


def _teacher(pair: Pair, batch: en.Batch, k: int, support: str) -> en.Teacher:
    logits = pair.local.score(batch, LogitsWanted(), "base")
    assert isinstance(logits, en.FullLogits)
    logp = (logits.logits + torch.randn(logits.logits.shape, generator=torch.Generator().manual_seed(6))).log_softmax(
        -1
    )
    exact = logp.gather(-1, batch.token_target[:, None])[:, 0]
    if support == "teacher":
        values, ids = logp.topk(k, -1)
        return en.Teacher(en.TopK(ids, values, tail_of(values).float()), logprobs=exact)
    top = pair.local.score(batch, TopKWanted(k))
    assert isinstance(top, en.TopK)
    values = logp.gather(-1, top.ids)
    return en.Teacher(ScoredAt(top.ids, values, tail_of(values).float()), logprobs=exact)


def _pairs(pair: Pair) -> en.Batch:
    encode = pair.local.policy.encode
    batch = en.Batch.from_rows(
        [encode("Sort: c a b")] * 2, [encode(" a b c"), encode(" c b a")], role=["chosen", "rejected"], pair=[0, 0]
    )
    lp = pair.local.score(batch, LogProbsWanted(), "base")
    assert isinstance(lp, Tensor)
    return batch.with_signals(reference=en.Reference(lp))


def _referenced(pair: Pair, batch: en.Batch) -> en.Batch:
    lp = pair.remote.score(batch, LogProbsWanted(), "base")
    assert isinstance(lp, Tensor)
    return batch.with_signals(reference=en.Reference(lp))


TOP: dict[str, dict[str, Any]] = {
    "gjs on the teacher's K": {"alpha": 0.5, "support": "teacher", "top_k": 16},
    "gjs on the student's K": {"alpha": 0.3, "support": "student", "top_k": 16},
    "forward": {"alpha": 0.0, "support": "teacher", "top_k": 16},
    "reverse": {"alpha": 1.0, "support": "student", "top_k": 16},
    "normalised, fewer than were sent": {"alpha": 0.7, "support": "teacher", "top_k": 7, "normalised": True},
    "renormalised": {"alpha": 0.5, "support": "teacher", "top_k": 16, "tail": "renormalise"},
    "unnormalised": {"alpha": 1.0, "support": "teacher", "top_k": 16, "tail": "unnormalised"},
}


@pytest.mark.parametrize("form", TOP)
def test_top_k_divergences_are_the_local_ones_step_by_step(pair: Pair, form: str) -> None:
    """(N, K) weights are the exact gradient: three AdamW steps, the last two off-policy, end at the same weights."""
    settings = TOP[form]
    batch = _batch(pair)
    batch = batch.with_signals(teacher=_teacher(pair, batch, 16, settings["support"]))
    objective = en.SDPO(**settings, importance_clip=1.2) + 0.1 * en.GRPO()
    for step in range(3):
        ours, theirs = pair.remote.step(batch, objective), pair.local.step(batch, objective)
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3, abs=2e-4)
        for label, term in ours.terms.items():
            local = theirs.terms[label]
            assert term.ran.split(" [")[0] == local.ran.split(" [")[0]
            assert (term.divergence, term.estimator) == (local.divergence, local.estimator)
            assert term.value == pytest.approx(local.value, rel=2e-3, abs=2e-4)
            for name in ("ratio", "ratio_max", "clip_high", "covered_mass"):
                if name in term.metrics:
                    assert term.metrics[name] == pytest.approx(local.metrics[name], rel=2e-3, abs=2e-3), name
        assert ours.update.gradient_norm == pytest.approx(theirs.update.gradient_norm, rel=2e-3)
        assert ours.update.clip_factor == pytest.approx(theirs.update.clip_factor, rel=2e-3)
        assert ours.update.version == step + 1
        pair.same_weights()
    assert "(N,K) weights" in ours.terms["sdpo"].ran
    assert ours.terms["sdpo"].estimator == "exact" and ours.terms["sdpo"].ran.startswith(
        ours.terms["sdpo"].divergence or "?"
    )
    assert ours.terms["grpo"].divergence is None and ours.terms["grpo"].estimator is None


def test_divergence_and_estimator_come_from_the_function_that_computed_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change with the settings; and where another function had run, they would be its words, not the settings'."""
    batch = _batch(pair)
    batch = batch.with_signals(teacher=_teacher(pair, batch, 16, "teacher"))
    forms: list[dict[str, Any]] = [{}, {"alpha": 1.0}, {"top_k": 7}, {"tail": "renormalise"}, {"normalised": True}]
    for engine in (pair.remote, pair.local):
        seen = [_said(engine, batch, **form) for form in forms]
        assert len(set(seen)) == len(forms) and {estimator for _, estimator in seen} == {"exact"}
        engine.estimator = "sampled"
        assert _said(engine, batch)[1] == "sampled"
        engine.estimator = "exact"
    real = known.exact
    monkeypatch.setattr(known, "exact", lambda *a: replace(real(*a), divergence="another", estimator="sampled"))
    assert _said(pair.remote, batch) == ("another", "sampled")


def _said(engine: Any, batch: en.Batch, **form: Any) -> tuple[str | None, str | None]:
    settings = {"alpha": 0.5, "support": "teacher", "top_k": 16, "importance_clip": 1.5, **form}
    term = engine.step(batch, en.SDPO(**settings)).terms["sdpo"]
    return term.divergence, term.estimator


def test_any_objective_of_log_probs_is_the_local_one(pair: Pair) -> None:
    batch = _referenced(pair, _batch(pair))
    pairs = _pairs(pair)
    for objective, on in (
        (en.GRPO(clip=0.1) + 0.3 * en.ReferenceKL(estimator="k3"), batch),
        (en.GSPO() + 0.2 * en.CISPO() + en.SAPO(), batch),
        (0.5 * en.DAPO() + en.ReferenceKL(), batch),
        (en.DPO(beta=0.3) + 0.5 * en.SimPO(), pairs),
    ):
        ours, theirs = pair.remote.step(on, objective), pair.local.step(on, objective)
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3, abs=1e-4)
        assert {k: v.ran for k, v in ours.terms.items()} == {k: v.ran for k, v in theirs.terms.items()}
        pair.same_weights()


def test_sft_with_several_targets_per_position(pair: Pair) -> None:
    one = en.Batch.from_rows([[5, 6]], [[7, 8, 9]], role="demonstration")
    targets = torch.stack([one.targets, one.targets + 3], -1)
    weight = torch.stack([0.7 * one.weight, 0.3 * one.weight], -1)
    batch = one.with_signals(targets=targets, weight=weight)
    ours, theirs = pair.remote.step(batch, en.SFT()), pair.local.step(batch, en.SFT())
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
    pair.same_weights()


@pytest.mark.parametrize("pair", [{"estimator": "sampled"}], indirect=True)
@pytest.mark.parametrize("form", ["scalar", "teacher", "student"])
def test_the_sampled_form_is_the_local_engines_sampled_form(pair: Pair, form: str) -> None:
    batch = _batch(pair)
    teacher = _teacher(pair, batch, 16, "teacher" if form == "scalar" else form)
    batch = batch.with_signals(teacher=teacher)
    support: dict[str, Any] = {"support": "full"} if form == "scalar" else {"support": form, "top_k": 16}
    objective = en.SDPO(alpha=1.0 if form == "scalar" else 0.5, importance_clip=1.3, **support)
    for _ in range(2):
        ours, theirs = pair.remote.step(batch, objective), pair.local.step(batch, objective)
        assert ours.terms["sdpo"].ran == theirs.terms["sdpo"].ran
        assert ours.terms["sdpo"].ran.startswith("sampled ")
        assert ours.terms["sdpo"].estimator == theirs.terms["sdpo"].estimator == "sampled"
        assert ours.terms["sdpo"].divergence == theirs.terms["sdpo"].divergence is not None
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3, abs=2e-4)
        pair.same_weights()
    with pytest.raises(ObjectiveError, match="biased off-policy"):
        pair.remote.step(batch, en.Distill(alpha=0.5, **support))


@pytest.mark.parametrize("pair", [{"estimator": "sampled"}], indirect=True)
def test_a_barrier_on_another_aggregate_than_the_mean_has_no_sampled_form(pair: Pair) -> None:
    batch = _batch(pair)
    teacher = _teacher(pair, batch, 16, "teacher")
    batch = batch.with_signals(reference=Reference(teacher.logprobs, teacher.distribution))
    for over in ("rmse", "p95", "max"):
        for engine in (pair.remote, pair.local):
            with pytest.raises(ObjectiveError, match=f"the {over} over positions is not linear in the divergence"):
                engine.step(batch, en.KLBarrier(over=over))


@pytest.mark.parametrize("pair", [{"estimator": "sampled"}], indirect=True)
def test_the_sampled_gradient_is_unbiased_over_the_wire(pair: Pair) -> None:
    """All 1,024 next tokens y, weighted by S(y), through forward and backward there: the exact gradient here."""
    prompt = pair.local.policy.encode("Sort:")
    one = en.Batch.from_rows([prompt], [[5]])
    logits = pair.local.score(one, LogitsWanted())
    assert isinstance(logits, en.FullLogits)
    student, V = logits.logits.softmax(-1)[0], logits.logits.shape[1]
    teacher = (logits.logits + torch.randn(1, V, generator=torch.Generator().manual_seed(9))).log_softmax(-1)
    values, ids = teacher.topk(16, -1)
    top = en.TopK(ids, values, tail_of(values).float())
    term = en.Distill(alpha=0.5, support="teacher", top_k=16)
    pair.local.estimator = "exact"
    theirs = pair.local.gradients(one.with_signals(teacher=en.Teacher(top)), term)
    every = en.Batch.from_rows([prompt] * V, [[y] for y in range(V)])
    many = en.TopK(ids.expand(V, -1), values.expand(V, -1), top.tail.expand(V))
    every = every.with_signals(teacher=en.Teacher(many, logprobs=teacher[0]))
    (need,) = term.needs(every, {})
    pair.remote.backward(every, {need: student})
    ours = {n: p.grad.clone() for n, p in pair.there.named_parameters().items()}
    close(ours, theirs, 2e-4)


def test_sampling_and_scoring_are_the_local_policys(pair: Pair) -> None:
    policy = pair.remote.policy
    prompt = policy.render([{"role": "user", "content": "Sort: c a b"}])
    assert prompt == pair.local.policy.render([{"role": "user", "content": "Sort: c a b"}])
    drawn = pair.remote.sample([prompt, prompt], 3, SampleSpec(max_new_tokens=8, seed=3))
    assert [(r.prompt_index, r.sample_index) for r in drawn] == [(i, j) for i in range(2) for j in range(3)]
    assert len({r.tokens for r in drawn}) > 1
    batch = en.Batch.from_rows([r.prompt for r in drawn], [r.tokens for r in drawn])
    for who in ("live", "base"):
        theirs = pair.local.score(batch, LogProbsWanted(), who)  # type: ignore[arg-type]
        ours = pair.remote.score(batch, LogProbsWanted(), who)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        top, local = pair.remote.score(batch, TopKWanted(9), who), pair.local.score(batch, TopKWanted(9), who)  # type: ignore[arg-type]
        assert isinstance(top, en.TopK) and isinstance(local, en.TopK)
        torch.testing.assert_close(top.logprobs, local.logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(top.tail.exp(), local.tail.exp(), atol=1e-4, rtol=1e-3)
        ids = local.ids[:, :4].contiguous()
        at = pair.remote.score(batch, AtIdsWanted(ids), who)  # type: ignore[arg-type]
        torch.testing.assert_close(at, pair.local.score(batch, AtIdsWanted(ids), who), atol=1e-4, rtol=1e-4)  # type: ignore[arg-type]
    behaviour = torch.tensor([v for r in drawn for v in r.logprobs])
    torch.testing.assert_close(behaviour, pair.local.score(batch, LogProbsWanted()), atol=1e-4, rtol=1e-4)


def _what(sample: RemoteSample) -> tuple[str, int]:
    """The type checker distinguishes the kinds; so does this test."""
    match sample.kind:
        case "scalar":
            return "scalar", len(sample.teacher)
        case "topk":
            return sample.support, sample.ids.shape[1]
        case _:
            assert_never(sample)


def test_samples_carry_both_sides_and_exact_log_probs_from_the_first_step_on(pair: Pair) -> None:
    policy = pair.remote.policy
    prompt = policy.render([{"role": "user", "content": "Sort: c a b"}])
    told = policy.render([{"role": "user", "content": "Sort: c a b. The answer is a b c."}])
    rollouts = pair.remote.sample([prompt], 3, SampleSpec(max_new_tokens=6, seed=1))
    own = en.Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts])
    informed = en.Batch.from_rows([told] * 3, [r.tokens for r in rollouts])
    exact = pair.local.score(informed, LogProbsWanted())
    for teacher in (None, en.RemoteTeacher("live")):
        scalar = pair.remote.observe(rollouts, [told] * 3, teacher)
        assert [_what(s) for s in scalar] == [("scalar", len(r.tokens)) for r in rollouts]
        torch.testing.assert_close(torch.tensor([v for s in scalar for v in s.teacher]), exact, atol=1e-4, rtol=1e-4)
    for support in ("teacher", "student"):
        samples = pair.remote.observe(rollouts, [told] * 3, en.RemoteTeacher("live"), top_k=12, support=support)
        assert {_what(s) for s in samples} == {(support, 12)}
        batch = batch_of(samples)
        assert batch.teacher is not None and isinstance(batch.teacher.distribution, en.TopK)
        assert isinstance(batch.teacher.distribution, ScoredAt) == (support == "student")
        source = batch.teacher.distribution
        torch.testing.assert_close(
            source.logprobs, pair.local.score(informed, AtIdsWanted(source.ids)), atol=1e-4, rtol=1e-4
        )
        ours = torch.cat([s.student_top for s in samples if s.kind == "topk"])
        torch.testing.assert_close(ours, pair.local.score(own, AtIdsWanted(source.ids)), atol=1e-4, rtol=1e-4)
        report = pair.remote.step(batch, en.SDPO(alpha=0.5, support=support, top_k=12))
        local = pair.local.step(batch, en.SDPO(alpha=0.5, support=support, top_k=12))
        assert report.loss == pytest.approx(local.loss, rel=2e-3, abs=1e-5)
        assert report.terms["sdpo"].metrics["ratio"] == pytest.approx(local.terms["sdpo"].metrics["ratio"], rel=1e-3)
        pair.same_weights()


def test_an_average_of_distributions_follows_its_recursion(served: Served) -> None:
    """T_t = (1-r)·T_{t-1} + r·p_t, asked at every step, beside the same recursion on log-probs taken as we went."""
    ema = en.RemoteEMA(rate=0.3, window=3)
    engine = en.TinkerEngine(
        "earnest/nano", en.AdamW(lr=2e-2), base_url=served.url, api_key=KEY, rank=2, seed=1, outer=ema
    )
    batch = en.Batch.from_rows([[5, 6, 7]], [[8, 9, 10, 11]], role="demonstration")

    def live() -> Tensor:
        found = engine.score(batch, LogProbsWanted())
        assert isinstance(found, Tensor)
        return found.double().exp()

    average = live()
    frozen = en.RemoteTeacher("base").logprobs(engine, batch)
    off = []
    for step in range(1, 8):
        said = engine.step(batch, en.SFT()).update.outer
        average = 0.7 * average + 0.3 * live()
        found = ema.logprobs(engine, batch).double().exp()
        assert sum(ema.weights) == pytest.approx(1.0) and said["ema_samplers"] == min(step + 1, 3)
        # Exact while the window has room for all; then off by no more than the share that it says was merged.
        assert said["ema_merged_share"] == pytest.approx(0.0 if step < 3 else 0.7**3)
        off.append(float((found - average).abs().max()))
        assert off[-1] < 1e-5 + said["ema_merged_share"]
    assert max(off[:2]) < 1e-5 and max(off[2:]) > 1e-3  # the merge does something, and the metric says how much
    assert torch.equal(en.RemoteTeacher("base").logprobs(engine, batch), frozen)
    ids = torch.tensor([[1, 2]] * 4)
    assert ema.at(engine, batch, ids).shape == (4, 2)
    with pytest.raises(SignalError, match="support='student'"):
        ema.top(engine, batch, 3)
    path = engine.training.save_weights_for_sampler("teacher").result().path
    kept = en.RemoteTeacher("frozen", path)
    before = kept.logprobs(engine, batch)
    torch.testing.assert_close(before.double().exp(), live(), atol=1e-5, rtol=1e-3)
    engine.step(batch, en.SFT())
    assert torch.equal(kept.logprobs(engine, batch), before)
    with pytest.raises(CheckpointError, match="cannot be continued"):
        engine.load("nowhere")


def test_two_averages_on_one_server_keep_their_samplers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as many past weights as a session may keep; neither takes the other's."""
    monkeypatch.setattr(samplers, "SNAPSHOTS", 3)
    batch = en.Batch.from_rows([[5, 6, 7]], [[8, 9, 10, 11]], role="demonstration")
    engines = [
        en.TinkerEngine(
            "earnest/nano", ADAM, base_url=served.url, api_key=KEY, rank=2, outer=en.RemoteEMA(0.3, window=2)
        )
        for _ in range(2)
    ]
    for _ in range(3):
        for engine in engines:
            assert engine.outer is not None
            engine.step(batch, en.SFT())
            assert bool(engine.outer.logprobs(engine, batch).isfinite().all())
    for engine in engines:
        engine.close()


def test_a_session_keeps_the_samplers_that_it_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "SNAPSHOTS", 3)
    kept, copy = samplers.Samplers(), samplers.Snapshot(en.LoRA(), (), {})
    for name in ("a:sample:0", "a:sample:1", "b:sample:0", "a:sample:2"):
        kept.add(name, name, copy, None)
    kept.add("a:sample:9", "base", None, None)
    kept.get("a:sample:0")
    kept.add("a:sample:3", "3", copy, None)
    there = [n for n in ("a:sample:0", "a:sample:1", "a:sample:2", "a:sample:3", "b:sample:0") if n in kept]
    assert there == ["a:sample:0", "a:sample:2", "a:sample:3", "b:sample:0"]
    with pytest.raises(ValueError, match="the session has used 3 others since"):
        kept.get("a:sample:1")
    kept.end("a")
    assert "a:sample:3" not in kept and "b:sample:0" in kept and "a:sample:9" in kept


def test_a_window_that_no_session_has_room_for_is_refused_at_the_start() -> None:
    assert MOST + 1 == samplers.SNAPSHOTS  # the window, and the newest before the oldest leaves
    assert (en.RemoteEMA(SLOWEST).window, en.RemoteEMA(0.02, window=MOST).window) == (63, MOST)
    with pytest.raises(SignalError, match=r"rate 0.02 with a window of 149 .* 63 at most, .* rate of 0.047 or more"):
        en.RemoteEMA(0.02)
    with pytest.raises(SignalError, match="a window of 64 past weights"):
        en.RemoteEMA(0.5, window=64)


@pytest.mark.parametrize(("rate", "window"), [(0.05, 59), (0.5, 5), (1.0, 2)])
def test_the_window_of_an_average_follows_from_its_rate(rate: float, window: int) -> None:
    ema = en.RemoteEMA(rate)
    assert ema.window == window and (1 - rate) ** window <= TOLERANCE
    engine: Any = SimpleNamespace(sampler=lambda _: object())
    ema.start(engine)
    for _ in range(3 * window):
        said = ema.after_update(engine)
    assert said["ema_samplers"] == window and said["ema_merged_share"] == pytest.approx((1 - rate) ** window)
    with pytest.raises(SignalError, match="window ≥ 2 or none"):
        en.RemoteEMA(rate, window=1)


def test_a_checkpoint_resumes(served: Served, tmp_path: Path) -> None:
    def make(**more: Any) -> en.TinkerEngine:
        given = {"base_url": served.url, "api_key": KEY, "rank": 2, "seed": 1, "train_unembed": False, **more}
        return en.TinkerEngine("earnest/nano", ADAM, **given)

    batch = en.Batch.from_rows([[5, 6, 7]], [[8, 9, 10]], role="demonstration")
    engine = make()
    engine.step(batch, en.SFT())
    engine.save(tmp_path / "c")
    further = engine.step(batch, en.SFT())
    other = make()
    other.load(tmp_path / "c")
    assert other.version == 1
    again = other.step(batch, en.SFT())
    assert (again.loss, again.update.gradient_norm) == (further.loss, further.update.gradient_norm)
    wrong = en.TinkerEngine("earnest/nano", en.AdamW(lr=1.0), base_url=served.url, api_key=KEY, rank=2)
    with pytest.raises(CheckpointError, match=r"AdamW\(lr=1.0"):
        wrong.load(tmp_path / "c")


def test_what_a_remote_engine_cannot_do_is_refused(pair: Pair, served: Served) -> None:
    engine, batch = pair.remote, _batch(pair)
    full = pair.local.score(batch, LogitsWanted())
    told = batch.with_signals(teacher=en.Teacher(full))  # type: ignore[arg-type]
    hot = batch.with_signals(temperature=0.7)
    for on, objective, said in (
        (batch, en.GRPO() + 0.1 * en.EntropyBonus(), "Entropy"),
        (batch, en.SpectralCap(), "SpectralNorm"),
        (hot, en.GRPO(), "temperature 1"),
        (told, en.Distill(), "log-probs of named tokens only"),
    ):
        with pytest.raises(ObjectiveError, match=said):
            engine.step(on, objective)
    with pytest.raises(SignalError, match="needs the signal 'teacher'"):
        engine.step(batch, en.Distill(support="teacher"))
    with pytest.raises(ObjectiveError, match="does not show gradients"):
        engine.step(batch, en.GRPO(), shares=True)
    with pytest.raises(ObjectiveError, match="before any backward"):
        engine.update()
    with pytest.raises(ObjectiveError, match="cannot give LogitsWanted"):
        engine.score(batch, LogitsWanted())
    with pytest.raises(SignalError, match="no earlier rounds"):
        engine.score(batch, LogProbsWanted(), "previous")
    with pytest.raises(ConfigError, match="AdamW"):
        en.TinkerEngine("earnest/nano", en.SGD(), base_url=served.url, api_key=KEY)
    with pytest.raises(ConfigError, match="'exact' or 'sampled'"):
        en.TinkerEngine("earnest/nano", base_url=served.url, api_key=KEY, estimator="x")  # type: ignore[arg-type]
    with pytest.raises(SignalError, match="'frozen' has a path"):
        en.RemoteTeacher("frozen")
    with pytest.raises(ConfigError, match="does not send its weights"):
        engine.adapter.state_dict()
    ours, theirs = (signature(f).parameters for f in (en.TinkerEngine, served.service.create_lora_training_client))
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        assert ours[name].default == theirs[name].default, f"{name} has the default of the SDK"


def test_a_full_teacher_is_cut_to_its_k_here(pair: Pair) -> None:
    """A teacher with every logit, on a top-K support: cut here, the student's own K asked for there."""
    batch = _batch(pair)
    logits = pair.local.score(batch, LogitsWanted(), "base")
    batch = batch.with_signals(teacher=en.Teacher(logits))  # type: ignore[arg-type]
    for support in ("teacher", "student"):
        objective = en.Distill(alpha=0.5, support=support, top_k=11)
        ours, theirs = pair.remote.step(batch, objective), pair.local.step(batch, objective)
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-3, abs=1e-5)
        pair.same_weights()

"""Top-K: what is compared, what the tail is, what is refused. Numbers by hand where they fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from earnest.engines.vocabulary import eager, fused, scalars
from earnest.errors import ObjectiveError, SignalError
from earnest.models.head import HeadSpec
from earnest.objectives.needs import Divergence, Entropy, LogProb, Need, SourceEntropy, SpectralNorm
from earnest.objectives.view import Field
from earnest.signals.batch import Batch
from earnest.signals.distributions import FullLogits, Hidden, ScoredAt, TopK
from tests.vocabulary.cases import ALPHAS, make_batch, make_head, normal, source, top_k, with_sources

V, d, N = 12, 5, 4

S = [0.4, 0.3, 0.2, 0.1]
T = [0.1, 0.2, 0.6, 0.1]


def field(student: list[float], teacher: Any, need: Need, **kwargs: Any) -> Field:
    """One token whose logits are log ``student``: the head is the identity."""
    k = len(student)
    eye = nn.Linear(k, k, bias=False, dtype=torch.float64).requires_grad_(False)
    with torch.no_grad():
        eye.weight.copy_(torch.eye(k))
    if isinstance(teacher, list):
        teacher = FullLogits(torch.tensor([teacher], dtype=torch.float64).log())
    batch = with_sources(Batch.from_rows([[0]], [[1]]), teacher=teacher)
    hidden = torch.tensor([student], dtype=torch.float64).log().requires_grad_()
    return scalars(hidden, HeadSpec(eye, None, None, False), batch, [need], **kwargs)[need]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def value(f: Field) -> float:
    return float(f.values.detach())


def test_the_three_conventions_by_hand() -> None:
    """S = (.4 .3 .2 .1), T = (.1 .2 .6 .1). The student's top 2 are tokens 0 and 1, the teacher's are 2 and 1."""
    bucket = field(S, T, Divergence("teacher", 1.0, support="student", top_k=2))
    assert value(bucket) == pytest.approx(kl([0.4, 0.3, 0.3], [0.1, 0.2, 0.7]), abs=1e-14)
    assert bucket.metrics is not None
    assert bucket.metrics["covered_mass"].value == pytest.approx(0.7)
    assert bucket.metrics["covered_mass_source"].value == pytest.approx(0.3)
    assert "student's top 2, bucket" in bucket.ran and bucket.ran.startswith("topk_reverse_kl")
    bucket = field(S, T, Divergence("teacher", 0.0, support="teacher", top_k=2))
    assert value(bucket) == pytest.approx(kl([0.6, 0.2, 0.2], [0.2, 0.3, 0.5]), abs=1e-14)
    renormalised = field(S, T, Divergence("teacher", 0.0, support="teacher", top_k=2, tail="renormalise"))
    assert value(renormalised) == pytest.approx(kl([0.75, 0.25], [0.4, 0.6]), abs=1e-14)
    unnormalised = field(S, T, Divergence("teacher", 1.0, support="teacher", top_k=2, tail="unnormalised"))
    want = 0.2 * math.log(0.2 / 0.6) - 0.2 + 0.6 + 0.3 * math.log(0.3 / 0.2) - 0.3 + 0.2
    assert value(unnormalised) == pytest.approx(want, abs=1e-14)
    values = {round(value(f), 9) for f in (bucket, renormalised, unnormalised)}
    assert len(values) == 3, "three conventions are three objectives"


def test_temperature_reaches_both_sides_by_hand() -> None:
    """At temperature 1/2 the probabilities are squared and normalised: (.16 .09 .04 .01)/.3 and (.01 .04 .36
    .01)/.42.
    """
    s, t = [x / 0.3 for x in (0.16, 0.09, 0.04, 0.01)], [x / 0.42 for x in (0.01, 0.04, 0.36, 0.01)]
    assert value(field(S, T, Divergence("teacher", 1.0, temperature=0.5))) == pytest.approx(kl(s, t), abs=1e-14)
    assert value(field(S, T, LogProb(0.5))) == pytest.approx(math.log(0.3), abs=1e-14)  # target 1: .09/.3
    assert value(field(S, T, SourceEntropy("teacher", 0.5))) == pytest.approx(
        -sum(x * math.log(x) for x in t), abs=1e-14
    )
    top = with_top = top_k(torch.tensor([T], dtype=torch.float64).log(), 2)
    got = field(S, with_top, Divergence("teacher", 1.0, support="teacher", tail="renormalise", temperature=0.5))
    assert value(got) == pytest.approx(kl([0.04 / 0.13, 0.09 / 0.13], [0.9, 0.1]), abs=1e-14)
    assert got.metrics is not None and got.metrics["covered_mass_source"].value == pytest.approx(0.8)
    assert top.ids.tolist() == [[2, 1]]


def test_blend_by_hand() -> None:
    """t = 1/2: p_t ∝ √(S·T). With logits over the vocabulary; on a received top-K over its K + 1 categories, and it
    says so.
    """
    raw = [math.sqrt(a * b) for a, b in zip(S, T, strict=True)]
    mix = [x / sum(raw) for x in raw]
    need = Divergence("teacher", 0.0, blend=0.5)
    got = field(S, T, need)
    assert value(got) == pytest.approx(kl(mix, S), abs=1e-14) and "blend 0.5 of the logits" in got.ran
    raw = [math.sqrt(a * b) for a, b in zip([0.2, 0.3, 0.5], [0.6, 0.2, 0.2], strict=True)]
    mix = [x / sum(raw) for x in raw]
    top = top_k(torch.tensor([T], dtype=torch.float64).log(), 2)
    got = field(S, top, Divergence("teacher", 0.0, support="teacher", blend=0.5))
    assert value(got) == pytest.approx(kl(mix, [0.2, 0.3, 0.5]), abs=1e-14)
    assert "of the log-probs on the support and tail, renormalised" in got.ran
    assert value(field(S, T, Divergence("teacher", 0.5, blend=0.0))) == 0
    one = value(field(S, T, Divergence("teacher", 0.5, blend=1.0)))
    assert one == pytest.approx(value(field(S, T, Divergence("teacher", 0.5))), abs=1e-15)


@pytest.mark.parametrize("support", ["student", "teacher"])
@pytest.mark.parametrize("tail", ["bucket", "renormalise", "unnormalised"])
@pytest.mark.parametrize("k", [V, V + 5])
def test_k_of_the_whole_vocabulary_is_the_full_path(support: Any, tail: Any, k: int) -> None:
    batch = with_sources(make_batch(N, V), teacher=source("hidden", N, V, d))
    hidden = normal(1, N, d).requires_grad_()
    full, top = Divergence("teacher", 1.0), Divergence("teacher", 1.0, support=support, top_k=k, tail=tail)
    fields = scalars(hidden, make_head(V, d), batch, [full, top])
    assert torch.equal(fields[full].values, fields[top].values)
    assert fields[top].ran.startswith("full_reverse_kl")


def test_a_received_top_k_of_the_whole_vocabulary_is_the_full_path() -> None:
    logits = normal(5, N, V)
    logp = logits.log_softmax(-1)
    ids = logits.argsort(-1)
    top = TopK(ids, logp.gather(-1, ids), torch.full((N,), -math.inf, dtype=torch.float64))
    hidden = normal(1, N, d)
    need = Divergence("teacher", 0.3)
    want = scalars(hidden, make_head(V, d), with_sources(make_batch(N, V), teacher=FullLogits(logits)), [need])[need]
    for asked in (
        need,
        Divergence("teacher", 0.3, support="teacher"),
        Divergence("teacher", 0.3, support="student", top_k=V),
    ):
        got = scalars(hidden, make_head(V, d), with_sources(make_batch(N, V), teacher=top), [asked])[asked]
        torch.testing.assert_close(got.values, want.values)
        assert got.ran == want.ran


@pytest.mark.parametrize("alpha", ALPHAS)
def test_received_and_own_logits_agree(alpha: float) -> None:
    """The teacher's top-K with a bucket is the same number from FullLogits and from what a service would have sent of
    them.
    """
    logits = normal(5, N, V, size=2)
    hidden, head = normal(1, N, d), make_head(V, d)
    at_hand = Divergence("teacher", alpha, support="teacher", top_k=4)
    want = scalars(hidden, head, with_sources(make_batch(N, V), teacher=FullLogits(logits)), [at_hand])[at_hand].values
    for sent in (4, 7):  # a longer list is cut, and what is cut joins the tail
        got = scalars(hidden, head, with_sources(make_batch(N, V), teacher=top_k(logits, sent)), [at_hand])[
            at_hand
        ].values
        torch.testing.assert_close(got, want)
    students = head.logits(hidden).topk(4, -1).indices
    scored = top_k(logits, 4, ScoredAt, ids=students)
    need = Divergence("teacher", alpha, support="student", top_k=4)
    want = scalars(hidden, head, with_sources(make_batch(N, V), teacher=FullLogits(logits)), [need])[need].values
    got = scalars(hidden, head, with_sources(make_batch(N, V), teacher=scored), [need])[need].values
    torch.testing.assert_close(got, want)


def test_the_tail_keeps_its_digits() -> None:
    """A tail of 1e-7: log(1 - Σp) in float32 would be off by a large part of it, and -inf for the student; log-sum-
    exp is not.
    """
    z = torch.tensor([[0.0, -1.0, *([-19.6] * 40)]])
    t = torch.tensor([[0.0, -1.0, *([-17.0] * 40)]])
    eye = nn.Linear(42, 42, bias=False).requires_grad_(False)
    with torch.no_grad():
        eye.weight.copy_(torch.eye(42))
    head, batch = HeadSpec(eye, None, None, False), with_sources(Batch.from_rows([[0]], [[1]]), teacher=FullLogits(t))
    need = Divergence("teacher", 0.0, support="student", top_k=2)
    got = float(scalars(z, head, batch, [need])[need].values)
    ls, lt = z.double().log_softmax(-1), t.double().log_softmax(-1)
    tails = ls[0, 2:].logsumexp(0), lt[0, 2:].logsumexp(0)
    want = float((lt[0, :2].exp() * (lt - ls)[0, :2]).sum() + tails[1].exp() * (tails[1] - tails[0]))
    assert got == pytest.approx(want, rel=1e-2)
    assert want < 1e-5, "the whole divergence is in the tail"
    naive = 1 - ls[0, :2].float().exp().sum()
    assert abs(float(naive) / float(tails[0].exp()) - 1) > 0.1


def test_a_received_tail_reports_its_error_bound() -> None:
    logits = torch.tensor([[0.0, -1.0, *([-17.0] * 40)]])
    top = top_k(logits, 2)
    fields = {}
    for tail in ("bucket", "renormalise"):
        need = Divergence("teacher", 0.5, support="teacher", tail=tail)  # type: ignore[arg-type]
        batch = with_sources(make_batch(1, 42), teacher=top)
        fields[tail] = scalars(
            normal(1, 1, d, dtype=torch.float32), make_head(42, d, dtype=torch.float32), batch, [need]
        )[need]
    assert fields["bucket"].metrics is not None and fields["renormalise"].metrics is not None
    assert 0.01 < fields["bucket"].metrics["tail_error_bound"].value < 1
    assert "tail_error_bound" not in fields["renormalise"].metrics


def test_the_entropy_of_a_received_top_k_is_named_a_lower_bound() -> None:
    got = field(S, top_k(torch.tensor([T], dtype=torch.float64).log(), 2), SourceEntropy("teacher"))
    assert value(got) == pytest.approx(-sum(p * math.log(p) for p in (0.6, 0.2, 0.2)), abs=1e-14)
    assert "lower bound" in got.ran
    assert value(got) < value(field(S, T, SourceEntropy("teacher")))


TOP = top_k(normal(5, N, V), 4)
LOGITS = FullLogits(normal(5, N, V))


@pytest.mark.parametrize(
    ("teacher", "need", "error", "message"),
    [
        (None, Divergence("teacher"), SignalError, "no distribution of the teacher"),
        (LOGITS, Divergence("reference"), SignalError, "no distribution of the reference"),
        (LOGITS, Divergence("teacher", 1.2), ObjectiveError, r"alpha must lie in 0…1"),
        (LOGITS, Divergence("teacher", math.nan), ObjectiveError, r"alpha must lie in 0…1"),
        (LOGITS, Divergence("teacher", blend=1.5), ObjectiveError, "blend must lie in 0…1"),
        (LOGITS, Divergence("teacher", temperature=0.0), ObjectiveError, "temperature must be above 0"),
        (LOGITS, LogProb(-1.0), ObjectiveError, "temperature must be above 0"),
        (LOGITS, Divergence("teacher", support="student"), ObjectiveError, "needs top_k of 1 or more"),
        (LOGITS, Divergence("teacher", support="teacher", top_k=0), ObjectiveError, "needs top_k of 1 or more"),
        (LOGITS, Divergence("teacher", top_k=5), ObjectiveError, "'full' compares all tokens"),
        (
            LOGITS,
            Divergence("teacher", 0.5, support="teacher", top_k=3, tail="unnormalised"),
            ObjectiveError,
            "set alpha to 1",
        ),
        (FullLogits(normal(5, N, V + 1)), Divergence("teacher"), SignalError, "13 logits per token, the policy 12"),
        (Hidden(normal(5, N, d + 1)), Divergence("teacher"), SignalError, "width 6, the policy's head takes 5"),
        (TOP, Divergence("teacher"), SignalError, "sent 4 of 12 log-probs"),
        (TOP, Divergence("teacher", support="student", top_k=4), SignalError, "own ids, not the student's"),
        (TOP, Divergence("teacher", support="teacher", top_k=5), SignalError, "give 1…4"),
        (TOP, Divergence("teacher", support="teacher", temperature=0.5), ObjectiveError, "no logits for a tail"),
        (TOP, SourceEntropy("teacher", 0.5), ObjectiveError, "no logits to divide by a temperature"),
        (
            ScoredAt(TOP.ids, TOP.logprobs, TOP.tail),
            Divergence("teacher", support="student", top_k=3),
            SignalError,
            "top_k must be 4",
        ),
        (
            TopK(TOP.ids + 9, TOP.logprobs, TOP.tail),
            Divergence("teacher", support="teacher"),
            SignalError,
            "outside the policy's vocabulary",
        ),
        (
            TopK(TOP.ids * 0, TOP.logprobs, TOP.tail),
            Divergence("teacher", support="teacher"),
            SignalError,
            "same id twice",
        ),
        (
            TopK(TOP.ids, TOP.logprobs, TOP.tail.exp()),
            Divergence("teacher", support="teacher"),
            SignalError,
            r"tail must be log\(1 - Σp\)",
        ),
        (LOGITS, SpectralNorm(), ObjectiveError, "not a per-token scalar"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused(teacher: Any, need: Need, error: type[Exception], message: str) -> None:
    batch = with_sources(make_batch(N, V), teacher=teacher)
    for module in (eager, fused):
        with pytest.raises(error, match=message):
            module.scalars(normal(1, N, d), make_head(V, d), batch, [need])


def test_two_models_are_noticed() -> None:
    with pytest.raises(SignalError, match="width 6 meet a head of width 5"):
        scalars(normal(1, N, d + 1), make_head(V, d), make_batch(N, V), [LogProb()])
    with pytest.raises(SignalError, match="target 11, the vocabulary has 5 tokens"):
        scalars(normal(1, 2, d), make_head(5, d), Batch.from_rows([[0]], [[3, 11]]), [Entropy()])
    with pytest.raises(SignalError, match="7 hidden states for 4 active tokens"):
        scalars(normal(1, 7, d), make_head(V, d), make_batch(N, V), [LogProb()])


def test_micro_batches_add_up_to_the_whole_with_their_metrics() -> None:
    """An uneven cut: values in order, and the covered mass of all tokens, not of the first part."""
    from earnest.engines import micro

    batch = with_sources(make_batch(9, V), teacher=source("logits", 5, V, d), at=[0, 1, 4, 7, 8])
    hidden, head = normal(1, 9, d), make_head(V, d)
    need = Divergence("teacher", 0.5, support="student", top_k=3)
    whole = scalars(hidden, head, batch, [need])[need]
    parts = [(p, scalars(hidden[p.token], head, p.batch, [need])) for p in micro.cut(batch, 1)]
    assert sorted(len(p.token) for p, _ in parts) == [3, 6]
    joined = micro.join([(p.token, found) for p, found in parts], 9)[need]
    torch.testing.assert_close(joined.values, whole.values)
    assert joined.at is not None and joined.at.tolist() == [0, 1, 4, 7, 8]
    assert joined.metrics is not None and whole.metrics is not None
    for name, metric in whole.metrics.items():
        assert joined.metrics[name].value == pytest.approx(metric.value)
    assert joined.metrics["covered_mass"].value != parts[0][1][need].metrics["covered_mass"].value

"""The sampled form of a divergence, on a whole engine: over all tokens of the vocabulary it is the exact one."""

from __future__ import annotations

import pytest
import torch

import earnest as en
from earnest.engines import LogitsWanted
from earnest.engines.vocabulary import known
from earnest.errors import ConfigError, ObjectiveError
from earnest.objectives.needs import Divergence
from earnest.signals.distributions import TopK

FORMS = {
    "jensen-shannon": {"alpha": 0.5},
    "reverse": {"alpha": 1.0},
    "forward": {"alpha": 0.0},
    "normalised": {"alpha": 0.3, "normalised": True},
    "the teacher's top 20": {"alpha": 0.5, "support": "teacher", "top_k": 20},
    "the student's top 20": {"alpha": 0.7, "support": "student", "top_k": 20},
    "unnormalised": {"alpha": 1.0, "support": "teacher", "top_k": 20, "tail": "unnormalised"},
}


@pytest.fixture(scope="module")
def two() -> tuple[en.LocalEngine, en.LocalEngine, list[int]]:
    torch.set_num_threads(1)
    policy = en.load("nano")
    adapter = en.attach(policy, en.LoRA(rank=4), seed=1)
    with torch.no_grad():
        for name, p in adapter.named_parameters().items():
            if name.endswith("B"):
                p.copy_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    exact, sampled = en.LocalEngine(policy, adapter), en.LocalEngine(policy, adapter, estimator="sampled")
    return exact, sampled, policy.encode("Sort: c a b")


@pytest.mark.parametrize("form", FORMS)
def test_the_mean_over_all_tokens_is_the_exact_gradient_and_value(
    two: tuple[en.LocalEngine, en.LocalEngine, list[int]], form: str
) -> None:
    """One row for every token y of the vocabulary, weighted by S(y): Σ S(y)·∇estimate(y) = ∇D, Σ S·estimate = D."""
    exact, sampled, prompt = two
    one = en.Batch.from_rows([prompt], [[5]])
    logits = exact.score(one, LogitsWanted()).logits  # type: ignore[union-attr]
    student, V = logits.softmax(-1)[0], logits.shape[1]
    teacher = logits + torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    every = en.Batch.from_rows([prompt] * V, [[y] for y in range(V)])
    weight = every.weight.clone()
    weight[:, len(prompt) - 1] = student
    one = one.with_signals(teacher=en.Teacher(en.FullLogits(teacher)))
    every = every.with_signals(weight=weight, teacher=en.Teacher(en.FullLogits(teacher.expand(V, -1))))
    term = en.Distill(**FORMS[form])  # type: ignore[arg-type]
    theirs, ours = exact.gradients(one, term), sampled.gradients(every, term)
    size = torch.stack([g.norm() for g in theirs.values()]).norm()
    off = torch.stack([(ours[n] - g).norm() for n, g in theirs.items()]).norm()
    assert float(off) < 5e-5 * float(size)
    (need,) = term.needs(every, {})
    found = sampled.scalars(every, [need])[need]
    want = float(exact.scalars(one, [need])[need].values[0])
    assert float((found.values * student).sum()) == pytest.approx(want, rel=1e-4)
    assert found.ran.startswith("sampled") and "one advantage per token" in found.ran


def test_what_has_no_sampled_form_is_refused(two: tuple[en.LocalEngine, en.LocalEngine, list[int]]) -> None:
    exact, sampled, prompt = two
    batch = en.Batch.from_rows([prompt], [[5, 6]])
    logits = exact.score(batch, LogitsWanted())
    batch = batch.with_signals(teacher=en.Teacher(logits))
    for term, said in (
        (en.Distill(support="teacher", top_k=5, tail="renormalise"), "target_weights"),
        (en.Distill(temperature=2.0), "temperature 1"),
        (en.TAID(), "target_weights"),
    ):
        with pytest.raises(ObjectiveError, match=said):
            sampled.step(batch, term)
    assert isinstance(logits, en.FullLogits)
    values, ids = logits.logits.log_softmax(-1).topk(2, -1)
    bare = batch.with_signals(teacher=en.Teacher(en.TopK(ids, values, known.tail_of(values))))
    with pytest.raises(ObjectiveError, match="never looked up"):
        sampled.step(bare, en.Distill())
    old = batch.with_signals(policy_version=torch.tensor([3]))
    with pytest.raises(ObjectiveError, match="biased off-policy"):
        sampled.gradients(old, en.Distill())
    with pytest.raises(ConfigError, match="'exact' or 'sampled'"):
        en.LocalEngine(exact.policy, exact.adapter, estimator="guess")  # type: ignore[arg-type]


def test_exact_from_k_log_probs_has_the_vocabulary_passs_value_and_gradient(
    two: tuple[en.LocalEngine, en.LocalEngine, list[int]],
) -> None:
    """``known.exact`` sees K log-probs and a tail of 1 - Σp; the vocabulary pass sees every logit."""
    exact, _, prompt = two
    batch = en.Batch.from_rows([prompt], [[5, 6, 7]])
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(4)).requires_grad_()
    head = exact.policy.head
    logits = head.logits(hidden)
    values, ids = (logits + torch.randn(3, 1024)).detach().log_softmax(-1).topk(20, -1)
    top = TopK(ids, values, known.tail_of(values))
    from earnest.engines.vocabulary import scalars

    for form in ({"alpha": 0.5}, {"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 0.3, "tail": "renormalise"}):
        need = Divergence("teacher", support="teacher", top_k=20, **form)  # type: ignore[arg-type]
        theirs = scalars(hidden, head, batch.with_signals(teacher=en.Teacher(top)), [need])[need]
        ours = known.exact(need, logits.log_softmax(-1).gather(-1, ids), top, None)
        torch.testing.assert_close(ours.values.detach(), theirs.values.detach().double(), atol=1e-5, rtol=1e-4)
        a, b = (torch.autograd.grad(f.values.sum(), hidden, retain_graph=True)[0] for f in (ours, theirs))
        torch.testing.assert_close(a.float(), b.float(), atol=1e-5, rtol=1e-3)
        assert ours.ran.split(" [")[0] == theirs.ran.split(" [")[0]


def test_the_sampled_form_is_refused_at_another_temperature(
    two: tuple[en.LocalEngine, en.LocalEngine, list[int]],
) -> None:
    """At T = 0.7 the expected gradient of the sampled form is off by a third, so it is refused."""
    _, sampled, prompt = two
    V = sampled.policy.head.weight.shape[0]
    batch = en.Batch.from_rows([prompt], [[5, 6]], temperature=0.7)
    batch = batch.with_signals(teacher=en.Teacher(en.FullLogits(torch.zeros(2, V))))
    with pytest.raises(ObjectiveError, match=r"temperature 0\.7.*sample at temperature 1, or take estimator='exact'"):
        sampled.step(batch, en.Distill())


@pytest.mark.parametrize("over", ["rmse", "p95", "max"])
def test_a_barrier_on_a_nonlinear_aggregate_is_refused(
    two: tuple[en.LocalEngine, en.LocalEngine, list[int]], over: str
) -> None:
    """The rmse of estimates per token has a gradient with cosine -0.94 to the exact one."""
    exact, sampled, prompt = two
    V = sampled.policy.head.weight.shape[0]
    batch = en.Batch.from_rows([prompt], [[5, 6]])
    batch = batch.with_signals(reference=en.Reference(distribution=en.FullLogits(torch.zeros(2, V)), kind="base"))
    with pytest.raises(ObjectiveError, match=r"not linear in the divergence.*over='mean'; or take estimator='exact'"):
        sampled.gradients(batch, en.KLBarrier(over=over))
    assert sampled.gradients(batch, en.KLBarrier(over="mean", tau=0.0))
    assert exact.gradients(batch, en.KLBarrier(over=over, tau=0.0))

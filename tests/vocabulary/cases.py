"""Heads, batches and distributions for the tests of the vocabulary pass, all asymmetric and small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from earnest.engines.vocabulary import eager, fused
from earnest.models.head import HeadSpec
from earnest.objectives.needs import Divergence, Entropy, LogProb, Need, SourceEntropy
from earnest.objectives.view import Field
from earnest.signals.batch import Batch, Reference, Teacher
from earnest.signals.distributions import Distribution, FullLogits, Hidden, ScoredAt, TopK

ALPHAS = (0.0, 0.1, 0.5, 0.9, 1.0)
HEADS: dict[str, dict[str, float | bool | None]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": 0.4},
    "all": {"bias": True, "softcap": 5.0, "scale": 1.7},
}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=rng(seed), dtype=torch.float64) * size).to(dtype)


def make_head(
    V: int,
    d: int,
    *,
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    trained: bool = False,
    size: float = 1.5,
) -> HeadSpec:
    linear = nn.Linear(d, V, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(normal(11, V, d, size=size))
        if bias:
            linear.bias.copy_(normal(12, V))
    return HeadSpec(linear.requires_grad_(trained), softcap, scale, tied=False)


def make_batch(N: int, V: int, *, seed: int = 0) -> Batch:
    """Two rows of N active tokens in all (one row for N = 1)."""
    ids = torch.randint(V, (N,), generator=rng(seed)).tolist()
    if N == 1:
        return Batch.from_rows([[0]], [ids])
    cut = max(1, N // 3)
    return Batch.from_rows([[0], [0, 0]], [ids[:cut], ids[cut:]])


def top_k(z: Tensor, k: int, kind: type[TopK] = TopK, ids: Tensor | None = None) -> TopK:
    """What a service would send of these logits."""
    logp = z.double().log_softmax(-1)
    ids = logp.topk(k, -1).indices if ids is None else ids
    rest = logp.scatter(-1, ids, float("-inf")).logsumexp(-1)
    return kind(ids, logp.gather(-1, ids).to(z.dtype), rest.to(z.dtype))


def source(
    kind: str, M: int, V: int, d: int, *, seed: int = 5, dtype: torch.dtype = torch.float64, k: int = 4
) -> Distribution:
    if kind == "hidden":
        return Hidden(normal(seed, M, d, dtype=dtype))
    logits = normal(seed, M, V, dtype=dtype, size=2.0)
    if kind == "logits":
        return FullLogits(logits)
    return top_k(logits, k, ScoredAt if kind == "scored" else TopK)


def with_sources(
    batch: Batch,
    *,
    teacher: Distribution | None = None,
    reference: Distribution | None = None,
    at: Sequence[int] | None = None,
) -> Batch:
    signals: dict[str, object] = {}
    if teacher is not None:
        signals["teacher"] = Teacher(teacher, None if at is None else torch.tensor(at, dtype=torch.long))
    if reference is not None:
        signals["reference"] = Reference(distribution=reference)
    return batch.with_signals(**signals)


def divergences(of: str, k: int = 3) -> list[Divergence]:
    """Every kind of divergence that a source with logits allows."""
    found = []
    for alpha in ALPHAS:
        base = Divergence(of, alpha)  # type: ignore[arg-type]
        found += [
            base,
            replace(base, normalised=True, temperature=0.7),
            replace(base, blend=0.3),
            replace(base, support="student", top_k=k),
            replace(base, support="student", top_k=k, temperature=1.6, normalised=True),
            replace(base, support="teacher", top_k=k, blend=0.6),
            replace(base, support="teacher", top_k=1, tail="renormalise"),
            replace(base, support="teacher", top_k=k, tail="renormalise", temperature=0.8),
        ]
    reverse = Divergence(of, 1.0, support="teacher", top_k=k, tail="unnormalised")  # type: ignore[arg-type]
    return [*found, reverse, replace(reverse, support="student", temperature=1.3), replace(reverse, top_k=1, blend=0.5)]


def plain_needs() -> list[Need]:
    return [LogProb(), LogProb(0.6), Entropy(), Entropy(1.4)]


ALL_NEEDS: list[Need] = [
    *plain_needs(),
    *divergences("teacher"),
    *divergences("reference"),
    SourceEntropy("teacher"),
    SourceEntropy("reference", 0.5),
]

# A spread of them that has every branch: for tests that turn another knob.
SOME_NEEDS: list[Need] = [
    LogProb(),
    LogProb(0.6),
    Entropy(1.4),
    Divergence("teacher", 0.3, temperature=0.7),
    Divergence("teacher", 1.0, support="student", top_k=3, normalised=True),
    Divergence("reference", 0.0),
    Divergence("reference", 0.9, support="teacher", top_k=2, tail="renormalise", blend=0.4),
    Divergence("teacher", 1.0, support="teacher", top_k=3, tail="unnormalised"),
    SourceEntropy("teacher"),
]


def upstream(field: Field, seed: int) -> Tensor:
    """A weight for every value, no two alike and of both signs."""
    return normal(100 + seed, *field.values.shape, dtype=field.values.dtype)


def both(
    hidden: Tensor,
    head: HeadSpec,
    batch: Batch,
    needs: Sequence[Need],
    *,
    budget_bytes: int = fused.BUDGET_BYTES,
    wide_eager: bool = False,
) -> tuple[dict[Need, Field], dict[Need, Field], list[Tensor], list[Tensor]]:
    """The eager and the fused fields, and the gradients of one non-uniformly weighted sum by the states and the
    trained head.
    """
    answers: list[dict[Need, Field]] = []
    gradients: list[list[Tensor]] = []
    for run in (eager.scalars, lambda *a: fused.scalars(*a, budget_bytes=budget_bytes)):
        states = hidden.clone().requires_grad_()
        fields = run(states, head, batch, needs)
        loss = sum(
            (f.values * upstream(f, i)).sum()
            for i, (n, f) in enumerate(fields.items())
            if not isinstance(n, SourceEntropy)
        )
        leaves = [states, *(p for p in head.module.parameters() if p.requires_grad)]
        answers.append(fields)
        gradients.append(list(torch.autograd.grad(loss, leaves)))  # type: ignore[arg-type]
    return answers[0], answers[1], gradients[0], gradients[1]


def assert_twins(*args: object, rtol: float = 1e-9, atol: float = 1e-11, **kwargs: object) -> dict[Need, Field]:
    slow, fast, slow_grads, fast_grads = both(*args, **kwargs)  # type: ignore[arg-type]
    for need, field in slow.items():
        twin = fast[need]
        torch.testing.assert_close(twin.values, field.values, rtol=rtol, atol=atol, msg=lambda m, n=need: f"{n}\n{m}")
        assert (twin.at is None) == (field.at is None)
        assert twin.ran.rsplit(" [", 1)[0] == field.ran.rsplit(" [", 1)[0]
        assert set(twin.metrics or {}) == set(field.metrics or {})
        for name, metric in (field.metrics or {}).items():
            assert abs((twin.metrics or {})[name].value - metric.value) <= 1e-5 * (1 + abs(metric.value))
    for got, want in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol * (1 + float(want.abs().max())))
    return fast

"""How the pass runs: which path, how many products, how large its tensors get, and what it does with the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from earnest.engines.vocabulary import eager, fused, plan, product, scalars, sweep
from earnest.engines.vocabulary.scratch import Scratch
from earnest.models.head import HeadSpec
from earnest.objectives.needs import Divergence, Entropy, LogProb, Need, SourceEntropy
from earnest.signals.batch import Reference, Teacher
from earnest.signals.distributions import Hidden
from tests.vocabulary.cases import SOME_NEEDS, make_batch, make_head, normal, source, upstream, with_sources

V, d, N = 40, 6, 24


class Watch(TorchDispatchMode):
    """Counts rows × products with the vocabulary, and remembers the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
            tensors = [a for a in args if isinstance(a, Tensor)]
            self.rows += tensors[-2].shape[0] if tensors[-2].shape[0] != V else tensors[-2].shape[1]
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def run(
    needs: list[Need], *, head: HeadSpec, batch: Any, grad: bool = True, rows: int = 5, module: Any = fused
) -> tuple[Watch, dict[Need, Any]]:
    hidden = normal(1, N, d).requires_grad_(grad)
    with Watch() as watch:
        fields = module.scalars(
            hidden, head, batch, needs, **({"budget_bytes": rows * V * 8 * 2} if module is fused else {})
        )
        if grad:
            torch.autograd.backward(
                [f.values for f in fields.values()], [torch.ones_like(f.values) for f in fields.values()]
            )
    return watch, fields


HIDDEN = with_sources(make_batch(N, V), teacher=source("hidden", N, V, d), reference=source("hidden", N, V, d, seed=8))


@pytest.mark.parametrize(
    ("needs", "path", "products"),
    [
        ([LogProb()], "forward-derivative", 1 + 1),
        ([LogProb(), Entropy()], "forward-derivative", 1 + 2),
        ([LogProb(), LogProb(0.5), Entropy()], "recompute", 3),  # k = 3 > 2
        ([Divergence("teacher")], "forward-derivative", 1 + 1 + 1),
        ([LogProb(), Divergence("teacher"), Divergence("reference", 1.0)], "forward-derivative", 1 + 3 + 2),
        ([LogProb(), Entropy(), LogProb(0.5), Divergence("teacher")], "recompute", 3 + 2),  # 1 + 4 + 1 > 5
    ],
    ids=lambda x: str(len(x)) if isinstance(x, list) else str(x),
)
def test_the_count_decides_and_is_reported(needs: list[Need], path: str, products: int) -> None:
    watch, fields = run(needs, head=make_head(V, d), batch=HIDDEN)
    assert {f.ran.rsplit("[")[-1] for f in fields.values()} == {f"{path}]"}
    assert watch.rows == products * N


@pytest.mark.parametrize(
    "needs", [[LogProb()], [LogProb(), Entropy(), Divergence("teacher"), SourceEntropy("teacher")]], ids=len
)
def test_without_a_gradient_no_derivative_is_made(needs: list[Need]) -> None:
    watch, fields = run(needs, head=make_head(V, d), batch=HIDDEN, grad=False)
    assert watch.rows == N * (1 if len(needs) == 1 else 2)
    assert all(f.ran.endswith("[values]") and not f.values.requires_grad for f in fields.values())
    with torch.no_grad():
        fields = scalars(normal(1, N, d).requires_grad_(), make_head(V, d, trained=True), make_batch(N, V), [LogProb()])
    assert fields[LogProb()].ran == "logprob [values]"
    with torch.inference_mode():
        inferred = scalars(normal(1, N, d), make_head(V, d), make_batch(N, V), [LogProb()])
    torch.testing.assert_close(inferred[LogProb()].values, fields[LogProb()].values)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_tensor_of_tokens_times_vocabulary(trained: bool) -> None:
    """Forward and backward; the eager twin, which has them, shows that the watch sees them."""
    batch = with_sources(make_batch(N, V), teacher=Hidden(normal(5, N, d)))
    batch = batch.with_signals(teacher=Teacher(Hidden(normal(5, N, d)), kind="live"))
    head = make_head(V, d, trained=trained)
    needs: list[Need] = [LogProb(), Divergence("teacher", 0.3), Divergence("teacher", 0.5, support="student", top_k=3)]
    watch, _ = run(needs, head=head, batch=batch, rows=5)
    assert watch.largest <= max(5 * V, V * d, N * d)
    watch, _ = run(needs, head=head, batch=batch, module=eager)
    assert watch.largest >= N * V


def test_a_frozen_head_gets_no_gradient_and_a_tied_one_stays_whole() -> None:
    """Tied and frozen: the head's weight is the embedding's, and neither has a gradient afterwards."""
    embedding = nn.Embedding(V, d, dtype=torch.float64)
    linear = nn.Linear(d, V, bias=False, dtype=torch.float64)
    linear.weight = embedding.weight
    linear.requires_grad_(False)
    before = embedding.weight.clone()
    _, fields = run([LogProb(), Entropy()], head=HeadSpec(linear, None, None, tied=True), batch=make_batch(N, V))
    assert fields[LogProb()].ran == "logprob [forward-derivative]"
    assert embedding.weight.grad is None and torch.equal(embedding.weight, before)


class LowRank(nn.Module):
    """A head with a low-rank delta beside it, as an adapter leaves it; the delta's parameters live elsewhere."""

    def __init__(self, linear: nn.Linear, down: nn.Parameter, up: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.delta = linear, lambda x: x @ down.t() @ up.t()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.delta(x)


def adapted(softcap: float | None) -> tuple[HeadSpec, nn.Parameter, nn.Parameter]:
    down, up = nn.Parameter(normal(20, 2, d)), nn.Parameter(normal(21, V, 2))  # perturbed: neither is 0
    plain = make_head(V, d, bias=True)
    assert isinstance(plain.module, nn.Linear)
    return HeadSpec(LowRank(plain.module, down, up), softcap, 0.7, tied=False), down, up


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_an_adapter_on_the_head_is_obeyed_and_trained(softcap: float | None) -> None:
    head, down, up = adapted(softcap)
    assert not head.plain
    batch = with_sources(
        make_batch(N, V), teacher=source("logits", 3, V, d), reference=source("logits", N, V, d), at=[1, 5, 9]
    )
    gradients = []
    for module, extra in ((eager, {}), (fused, {"budget_bytes": 5 * V * 8 * 3})):
        hidden = normal(1, N, d).requires_grad_()
        fields = module.scalars(hidden, head, batch, SOME_NEEDS, **extra)
        loss = sum(
            (f.values * upstream(f, i)).sum()
            for i, (n, f) in enumerate(fields.items())
            if not isinstance(n, SourceEntropy)
        )
        gradients.append(torch.autograd.grad(loss, [hidden, down, up]))  # type: ignore[arg-type]
    assert all(f.ran.endswith("[recompute]") for f in fields.values())
    for got, want in zip(gradients[1], gradients[0], strict=True):
        assert float(want.abs().max()) > 1e-3
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("how", ["adapter", "trained"])
def test_another_policys_states_are_not_read_through_a_trained_head(how: str) -> None:
    """Reference hidden states through a head that trains would make the reference follow the policy, silently."""
    head = adapted(None)[0] if how == "adapter" else make_head(V, d, trained=True)
    reference = make_batch(N, V).with_signals(reference=Reference(distribution=Hidden(normal(5, N, d))))
    with pytest.raises(ValueError, match=r"reference \('base'\).*head is trained.*FullLogits"):
        scalars(normal(1, N, d), head, reference, [Divergence("reference", 1.0)])
    for kind in ("ema", "base", "given"):
        teacher = make_batch(N, V).with_signals(teacher=Teacher(Hidden(normal(5, N, d)), kind=kind))
        with pytest.raises(ValueError, match=f"teacher \\('{kind}'\\)"):
            scalars(normal(1, N, d), head, teacher, [Divergence("teacher")])


def test_weights_that_changed_before_the_backward_pass_are_noticed() -> None:
    """Recomputation from other weights would be a gradient of nothing."""
    head = make_head(V, d, trained=True)
    values = scalars(normal(1, N, d).requires_grad_(), head, make_batch(N, V), [LogProb()])[LogProb()].values
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_a_scalar_that_the_loss_does_not_use_costs_no_gradient() -> None:
    hidden = normal(1, N, d).requires_grad_()
    for head in (make_head(V, d), make_head(V, d, trained=True)):
        fields = scalars(hidden, head, make_batch(N, V), [LogProb(), Entropy()])
        (got,) = torch.autograd.grad(fields[LogProb()].values.sum(), hidden)
        (want,) = torch.autograd.grad(
            eager.scalars(hidden, head, make_batch(N, V), [LogProb()])[LogProb()].values.sum(), hidden
        )
        torch.testing.assert_close(got, want)


def test_values_do_not_depend_on_the_path_beyond_rounding() -> None:
    needs: list[Need] = [LogProb(), Divergence("teacher", 0.3)]
    a, b = (
        run(needs, head=make_head(V, d), batch=HIDDEN)[1],
        run(needs, head=make_head(V, d), batch=HIDDEN, grad=False, rows=7)[1],
    )
    for need in needs:
        torch.testing.assert_close(a[need].values, b[need].values, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_known_weights_are_pulled_back_in_one_product(trained: bool) -> None:
    """A caller that knows the loss's derivative by every scalar gets the same gradient, with 2 + s products for five
    scalars.
    """
    head = make_head(V, d, bias=True, softcap=6.0, trained=trained)
    batch = with_sources(make_batch(N, V), teacher=source("logits" if trained else "hidden", 3, V, d), at=[1, 5, 9])
    needs: list[Need] = [LogProb(), Entropy(), LogProb(0.5), Divergence("teacher", 0.3), Divergence("teacher", 1.0)]
    body = normal(2, d, d).requires_grad_()  # what the states are made from
    leaves = [body, *(p for p in head.module.parameters() if p.requires_grad)]

    def states() -> Tensor:
        return normal(1, N, d) @ body

    fields = scalars(states(), head, batch, needs)
    weights = {need: upstream(field, i) for i, (need, field) in enumerate(fields.items())}
    want = torch.autograd.grad([f.values for f in fields.values()], leaves, list(weights.values()))
    hidden = states()
    with Watch() as watch:
        todo, factor = plan.make(needs, batch, head, hidden), product.of(head, hidden.dtype)
        swept = sweep.Sweep(todo, factor, batch.token_target, vocabulary=V, budget_bytes=5 * V * 8 * 3)
        into = [torch.zeros_like(leaf) for leaf in factor.leaves]
        by_hidden = swept.pull(hidden.detach(), weights, into)
        torch.autograd.backward([hidden, *factor.leaves], [by_hidden, *into])
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-10, atol=1e-10)
    if not trained:
        assert watch.rows <= 2 * N + 3 + 2 * d  # the rest is the body's own product


def test_the_memory_of_a_block_is_used_again_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Scratch] = []

    class Kept(Scratch):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(sweep, "Scratch", Kept)
    run([LogProb(), Entropy(), Divergence("teacher", 0.3)], head=make_head(V, d), batch=HIDDEN, rows=1)
    assert 0 < max(len(one._buffers) for one in made) <= 8, "not one for each of 24 blocks"

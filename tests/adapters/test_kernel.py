"""The low-rank kernel against plain autograd, and the tensors that it keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from earnest.adapters import HRA, ROAD, AntiPaSTO, DoRA, LoRA, PiSSA, VeRA, attach, kernel
from earnest.adapters.gains import gained, turned
from earnest.adapters.kernel import Around, Factors, low_rank


def plain(y: Tensor, x: Tensor, a: Tensor, b: Tensor, s: float) -> Tensor:
    return y + s * (x @ a.T) @ b.T


def drawing(seed: int, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    """Normal numbers of a shape, from one stream."""
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=rng, dtype=dtype)


def same_gradients(
    got: Tensor, mine: Sequence[Tensor], want: Tensor, others: Sequence[Tensor], upstream: Tensor
) -> None:
    """Both outputs give the same gradients, and no gradient to the same leaves."""
    got.backward(upstream)
    want.backward(upstream)
    for a, b in zip(mine, others, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    k=st.integers(1, 5),
    s=st.floats(-3, 3).filter(lambda v: abs(v) > 1e-3),
    needs=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=80)
def test_value_and_gradients(lead, m, n, k, s, needs, seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((*lead, m), (*lead, n), (k, n), (m, k))
    tensors = [
        torch.randn(sh, generator=rng, dtype=torch.float64).requires_grad_(q)
        for sh, q in zip(shapes, needs, strict=True)
    ]
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    upstream = torch.randn(*lead, m, generator=rng, dtype=torch.float64)  # not uniform
    got = low_rank(tensors[0], tensors[1], Factors(tensors[2], tensors[3], s))
    want = plain(*copies, s)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    same_gradients(got, tensors, want, copies, upstream)


@given(
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    r=st.integers(1, 4),
    strong=st.booleans(),
    needs=st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=80)
def test_around_a_frozen_start_equals_its_plain_factors(m, n, r, strong, needs, seed) -> None:
    """Value with and without gradients, and every gradient, against autograd through the two cat-ed factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SMALL", 0)
        _around_equals_plain(m, n, r, strong, needs, seed)


def _around_equals_plain(m: int, n: int, r: int, strong: bool, needs: list[bool], seed: int) -> None:
    draw = drawing(seed, torch.float64)
    start, frozen = draw(r, n), draw(m, r)
    trained = [draw(3, m), draw(3, n), draw(r, n), draw(m, r), draw(1)]
    for t, q in zip(trained, needs, strict=True):
        t.requires_grad_(q and (strong or t is not trained[4]))
    if not any(t.requires_grad for t in trained):
        trained[2].requires_grad_()
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in trained]
    upstream = draw(3, m)

    def form(y: Tensor, x: Tensor, d: Tensor, left: Tensor, strength: Tensor) -> tuple[Tensor, Tensor, Around]:
        return y, x, Around(start, d, left, frozen, 1.5, strength if strong else None)

    got = low_rank(*form(*trained))
    y, x, f = form(*copies)
    want = plain(y, x, f.plain().A, f.plain().B, f.scale)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(low_rank(*form(*trained)), want, rtol=1e-10, atol=1e-10)
    same_gradients(got, trained, want, copies, upstream)


@pytest.mark.parametrize("small", [0, 2**17])  # by the Functions, and by plain autograd
@pytest.mark.parametrize("half", [1, 2])  # both halves share their numbers, or each has its own
def test_gains_and_turns_against_autograd(half: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SMALL", small)
    draw = drawing(half, torch.float64)
    y, e, e1, e2 = (draw(*shape).requires_grad_() for shape in ((2, 3, 12), (12,), (2, half, 3), (2, half, 3)))
    assert torch.autograd.gradcheck(gained, (y, e))
    assert torch.autograd.gradcheck(turned, (y, e1, e2))

    pairs = y.view(2, 3, 2, 2, 3)
    rotated = torch.stack((-pairs[..., 1, :], pairs[..., 0, :]), -2)
    want = (pairs + e1 * pairs + e2 * rotated).view(y.shape)
    torch.testing.assert_close(turned(y, e1, e2), want)
    with torch.no_grad():
        torch.testing.assert_close(turned(y, e1, e2), want)
        torch.testing.assert_close(gained(y, e), y + e * y)


@pytest.mark.parametrize("small", [0, 2**17])
def test_a_strength_near_one_is_not_rounded_away_in_bf16(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strength of 1.0025 is 1 in bf16; the product and its gradient keep the difference."""
    monkeypatch.setattr(kernel, "SMALL", small)
    draw = drawing(0)
    start, delta, left, frozen = draw(4, 64), 0.1 * draw(4, 64), draw(64, 4), draw(64, 4)
    x, y = draw(256, 64).bfloat16(), torch.zeros(256, 64, dtype=torch.bfloat16)

    def out(strength: float) -> tuple[Tensor, Tensor]:
        s = torch.tensor([strength], requires_grad=True)
        return low_rank(y, x, Around(start, delta, left, frozen, 1.0, s)), s

    (one, _), (more, s) = out(1.0), out(1.0025)
    ratio = float((more.detach().double() * one.detach().double()).sum() / one.detach().double().square().sum())
    assert ratio == pytest.approx(1.0025, abs=5e-4)
    (slope,) = torch.autograd.grad(more.float().square().sum() / 2, s)
    assert float(slope) == pytest.approx(float(one.detach().double().square().sum()), rel=0.02)


def test_a_frozen_offset_keeps_no_tensor_for_backward() -> None:
    for variant in (PiSSA(RANK), ROAD(group=8)):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        adapter = attach(model, variant, targets=["0"])
        for p in adapter.parameters():
            p.requires_grad_(False)
        x = torch.randn(4096, WIDTH, requires_grad=True)  # many tokens: the kernels' own backward
        assert saved_bytes(model, x) < 4096 * 4


@pytest.mark.parametrize("small", [0, 2**17])
def test_a_gain_near_one_is_not_rounded_away_in_bf16(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many outputs a gain of 1e-2, near bf16's step at 1, acts as 1e-2 on the mean; and its gradients."""
    monkeypatch.setattr(kernel, "SMALL", small)
    rng = torch.Generator().manual_seed(0)
    y = (1 + torch.rand(4096, 8, generator=rng)).bfloat16().requires_grad_()
    e = torch.full((8,), 1e-2, requires_grad=True)
    out = gained(y, e)
    assert float((out.float() - y.float()).detach().mean() / y.detach().float().mean()) == pytest.approx(1e-2, rel=0.1)
    upstream = torch.randn(4096, 8, generator=rng).bfloat16()
    out.backward(upstream)
    assert y.grad is not None and e.grad is not None
    torch.testing.assert_close(e.grad, (upstream.float() * y.float()).sum(0).detach(), rtol=0.02, atol=0.5)
    torch.testing.assert_close(y.grad.float(), upstream.float() * 1.01, rtol=2**-7, atol=0)


def test_hand_worked() -> None:
    # x = (1, 2), A = (3, 4): h = 11. B = (1, −1)ᵀ, s = 2: Δ = (22, −22). With g = (1, 10): u = s·g·B = −18, dA = −18·x.
    x, a = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[3.0, 4.0]], requires_grad=True)
    b, y = torch.tensor([[1.0], [-1.0]], requires_grad=True), torch.zeros(1, 2)
    out = low_rank(y, x, Factors(a, b, 2.0))
    assert out.tolist() == [[22.0, -22.0]]
    out.backward(torch.tensor([[1.0, 10.0]]))
    assert a.grad is not None and a.grad.tolist() == [[-18.0, -36.0]]
    assert b.grad is not None and b.grad.tolist() == [[22.0], [220.0]]
    assert x.grad is not None and x.grad.tolist() == [[-54.0, -72.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("core", ["identity", "diagonal", "blocks"])
def test_core_and_gain_equal_their_dense_form(core: str, gain: bool, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    shape = {"identity": None, "diagonal": (6,), "blocks": (2, 3, 3)}[core]
    middle = None if shape is None else torch.randn(shape, generator=rng)
    outer = torch.randn(4, generator=rng) if gain else None
    f = Factors(torch.randn(6, 5, generator=rng), torch.randn(4, 6, generator=rng), 0.5, middle, outer)
    x = torch.randn(3, 7, 5, generator=rng).to(dtype)
    got = low_rank(torch.zeros(3, 7, 4, dtype=dtype), x, f)
    tolerance = 1e-5 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(got.float(), x.float() @ f.dense().T, rtol=0, atol=tolerance)
    torch.testing.assert_close(f.cast(torch.float32).dense(), f.dense())


def test_a_small_basis_is_folded_for_sampling_and_a_full_one_stays_shared() -> None:
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    small = Factors(a, b, 1.0, torch.randn(2)).cast(torch.float32)
    assert small.core is None and small.B is not b
    full = Factors(torch.randn(8, 8), (u := torch.randn(8, 8)), 1.0, torch.randn(8)).cast(torch.float32)
    assert full.core is not None and full.B is u


def test_second_derivatives_raise_instead_of_being_wrong() -> None:
    a, b = (torch.randn(2, 2, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 2, dtype=torch.bfloat16)
    out = low_rank(torch.zeros(2, 2, dtype=torch.bfloat16), x, Factors(a, b)).float().pow(2).sum()
    (g,) = torch.autograd.grad(out, a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64]
)  # float64: through the kernel, because A and B are cast
def test_per_sample_gradients_by_vmap(dtype: torch.dtype) -> None:
    x, a, b = torch.randn(5, 3, dtype=dtype), torch.randn(2, 3), torch.randn(4, 2)

    def loss(b: Tensor, row: Tensor) -> Tensor:
        return low_rank(torch.zeros(1, 4, dtype=dtype), row[None], Factors(a, b, 1.5)).pow(2).sum()

    with torch.enable_grad():
        got = torch.func.vmap(torch.func.grad(loss), (None, 0))(b.requires_grad_(), x)
    for i in range(5):
        (want,) = torch.autograd.grad(loss(b, x[i]), b)
        torch.testing.assert_close(got[i], want)


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes of distinct tensors kept for backward, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in [*layer.parameters(), *layer.buffers()]}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x)
    assert out.requires_grad
    return sum(kept.values())


TOKENS, WIDTH, RANK = 64, 128, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_keeps_x_in_the_base_dtype_and_h_and_nothing_more(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(dtype)
    attach(model, LoRA(RANK), targets=["0"])
    x = torch.randn(TOKENS, WIDTH, dtype=dtype)
    size = x.element_size()
    assert saved_bytes(model, x) == TOKENS * WIDTH * size + TOKENS * RANK * size


def test_frozen_bases_keep_h_only() -> None:
    """And, where the outputs have a gain (VeRA), what it multiplies."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    attach(model, AntiPaSTO(rank=RANK, block=0), targets=["0"])
    few = 4 * RANK * 4  # the r-vectors of the gain
    assert saved_bytes(model, torch.randn(TOKENS, WIDTH)) <= TOKENS * RANK * 4 + few
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    attach(model, VeRA(RANK), targets=["0"])
    assert saved_bytes(model, torch.randn(TOKENS, WIDTH)) <= 2 * TOKENS * RANK * 4 + TOKENS * WIDTH * 4 + few


def test_dora_and_hra_keep_no_weight_sized_tensor() -> None:
    for variant in (DoRA(RANK), HRA(RANK)):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
        attach(model, variant, targets=["0"])
        assert saved_bytes(model, torch.randn(4, 1024)) < 1024 * 1024 * 4


@given(
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    k=st.integers(1, 5),
    s=st.sampled_from([-2.0, 0.5, 3.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_the_casting_kernel_has_the_gradients_of_plain_autograd(m: int, n: int, k: int, s: float, seed: int) -> None:
    """fp32 factors on a float64 layer: the custom function runs, and its gradients are exact to fp32."""
    rng = torch.Generator().manual_seed(seed)
    y, x = torch.randn(5, m, generator=rng, dtype=torch.float64), torch.randn(5, n, generator=rng, dtype=torch.float64)
    a, b = torch.randn(k, n, generator=rng), torch.randn(m, k, generator=rng)
    mine = [t.clone().requires_grad_() for t in (y, x, a, b)]
    theirs = [t.double().clone().requires_grad_() for t in (y, x, a, b)]
    upstream = torch.randn(5, m, generator=rng, dtype=torch.float64)
    got, want = low_rank(mine[0], mine[1], Factors(mine[2], mine[3], s)), plain(*theirs, s)
    torch.testing.assert_close(got, want)
    got.backward(upstream)
    want.backward(upstream)
    for p, q in zip(mine, theirs, strict=True):
        assert p.grad is not None and q.grad is not None and p.grad.dtype == p.dtype
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-5, atol=1e-5)

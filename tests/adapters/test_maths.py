"""Each variant's equation against an independent float64 form, worked numbers, and properties."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from earnest.adapters import EVA, HRA, IA3, IA3FF, OFT, ROAD, AntiPaSTO, DeLoRA, DoRA, LoRA, PiSSA, VeRA, attach
from earnest.adapters.adapter import Adapter
from earnest.adapters.conformance import perturb
from earnest.adapters.linalg import bounded, cayley_minus_identity, skew
from earnest.adapters.variant import Variant

M, N = 12, 8


def layer(
    variant: Variant, seed: int = 0, bias: bool = True, **kwargs
) -> tuple[nn.Sequential, Adapter, Tensor, Tensor | None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(N, M, bias=bias))
    linear = model[0]
    w, b = linear.weight.detach().double(), linear.bias.detach().double() if bias else None
    adapter = attach(model, variant, targets=["0"], seed=seed, **kwargs)
    return model, adapter, w, b


def tensors(adapter: Adapter) -> dict[str, Tensor]:
    return {k.removeprefix("0."): v.detach().double() for k, v in adapter.named_tensors().items()}


def check(model: nn.Module, w: Tensor, b: Tensor | None, seed: int = 1) -> None:
    x = torch.randn(5, N, generator=torch.Generator().manual_seed(seed))
    want = x.double() @ w.T + (0 if b is None else b)
    with torch.no_grad():
        got = model(x)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6 * float(want.abs().max() + 1))
    torch.testing.assert_close(
        model(x).double(), want, rtol=0, atol=3e-6 * float(want.abs().max() + 1)
    )  # with gradient


@pytest.mark.parametrize("rs", [False, True])
def test_lora(rs: bool) -> None:
    model, adapter, w, b = layer(LoRA(4, alpha=3.0, rslora=rs))
    perturb(adapter)
    t = tensors(adapter)
    check(model, w + (3 / 2 if rs else 3 / 4) * t["B"] @ t["A"], b)


def test_pissa_equals_the_papers_residual_form() -> None:
    model, adapter, w, b = layer(PiSSA(3, alpha=6.0))
    perturb(adapter)
    t = tensors(adapter)
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    top = u[:, :3] * s[:3] @ vh[:3]
    torch.testing.assert_close(2 * t["B0"] @ t["A0"], top, rtol=0, atol=1e-5)
    check(model, (w - top) + 2 * (t["B0"] + t["dB"]) @ (t["A0"] + t["dA"]), b)


def test_randomised_svd_finds_the_principal_part() -> None:
    _, exact, _, _ = layer(PiSSA(3))
    _, fast, _, _ = layer(PiSSA(3, niter=8))
    a, b = tensors(exact), tensors(fast)
    torch.testing.assert_close(b["B0"] @ b["A0"], a["B0"] @ a["A0"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_dora(bias: bool) -> None:
    model, adapter, w, b = layer(DoRA(4, alpha=8.0), bias=bias)
    perturb(adapter)
    t = tensors(adapter)
    v = w + 2 * t["B"] @ t["A"]
    check(model, (w.norm(dim=1) * (1 + t["dm"]) / v.norm(dim=1))[:, None] * v, b)


def test_dora_norm_has_no_gradient_and_follows_writes_through_data() -> None:
    model, adapter, w, b = layer(DoRA(2))
    perturb(adapter)
    x = torch.randn(3, N)
    model(x)
    slot = next(iter(adapter.slots.values()))
    slot.B.data.mul_(3.0)  # autograd's version counter does not see this
    t = tensors(adapter)
    v = w + 8 * t["B"] @ t["A"]
    check(model, (w.norm(dim=1) * (1 + t["dm"]) / v.norm(dim=1))[:, None] * v, b)


def test_a_permutation_written_through_data_is_seen() -> None:
    """The cache was once keyed by the sum of the bits, which a permutation does not change."""
    model, adapter, w, b = layer(DoRA(2))
    perturb(adapter)
    with torch.no_grad():
        model(torch.randn(3, N))
    slot = next(iter(adapter.slots.values()))
    slot.B.data.copy_(slot.B.data.flip(0).clone())
    t = tensors(adapter)
    v = w + 8 * t["B"] @ t["A"]
    check(model, (w.norm(dim=1) * (1 + t["dm"]) / v.norm(dim=1))[:, None] * v, b)


def test_delora_both_inits() -> None:
    def n(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return b / (a.norm(dim=1) * b.norm(dim=0)) @ a * w.norm(dim=0)

    model, adapter, w, b = layer(DeLoRA(4, lam=5.0))
    perturb(adapter)
    t = tensors(adapter)
    moved = n(t["A0"] + t["dA"], t["B0"] + t["dB"], w) - n(t["A0"], t["B0"], w)
    check(model, w + (5 + t["dlam"]) / 4 * moved, b)
    model, adapter, w, b = layer(DeLoRA(4, lam=5.0, init="zero"))
    perturb(adapter)
    t = tensors(adapter)
    check(model, w + t["lam"] / 4 * n(t["A"], t["B"], w), b)


def test_deloras_first_step_is_small_from_the_copy_and_not_from_zero() -> None:
    sizes = {}
    for init in ("frozen_copy", "zero"):
        for lr in (1e-3, 1e-5):
            model, adapter, w, _ = layer(DeLoRA(4, init=init))
            optimizer = torch.optim.AdamW(adapter.parameters(), lr=lr)
            model(torch.randn(4, N, generator=torch.Generator().manual_seed(0))).pow(2).sum().backward()
            optimizer.step()
            sizes[init, lr] = float(next(adapter.deltas())[1].norm() / w.norm())
    assert sizes["frozen_copy", 1e-5] < 0.02 * sizes["frozen_copy", 1e-3]
    assert sizes["zero", 1e-5] > 0.3 * sizes["zero", 1e-3]  # the reason why frozen_copy is the default


def test_ia3_and_its_ff() -> None:
    model, adapter, w, b = layer(IA3())
    perturb(adapter)
    g = 1 + tensors(adapter)["d"]
    assert b is not None
    check(model, g[:, None] * w, g * b)
    model, adapter, w, b = layer(IA3FF())
    perturb(adapter)
    check(model, w * (1 + tensors(adapter)["d"]), b)


def test_hra_is_the_product_of_its_reflections() -> None:
    model, adapter, w, b = layer(HRA(6))
    perturb(adapter, std=0.5)
    t = tensors(adapter)
    r = torch.eye(N, dtype=torch.float64)
    for u in t["U0"] + t["dU"]:
        r = r @ (torch.eye(N, dtype=torch.float64) - 2 * torch.outer(u, u) / u.dot(u))
    check(model, w @ r, b)
    torch.testing.assert_close(r @ r.T, torch.eye(N, dtype=torch.float64))


def test_hra_pairs_get_opposite_gradients_at_initialization() -> None:
    model, adapter, _, _ = layer(HRA(4))
    model(torch.randn(3, N)).pow(2).sum().backward()
    (p,) = adapter.parameters()
    assert p.grad is not None
    torch.testing.assert_close(p.grad[0::2], -p.grad[1::2], rtol=1e-4, atol=1e-6)


def test_eva_starts_at_the_inputs_top_directions_without_padding() -> None:
    model = nn.Sequential(nn.Embedding(20, N), nn.Linear(N, M))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.inner(input_ids)

    ids = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    adapter = attach(Wrapped(), EVA(3), targets=["1"], calibration=[{"input_ids": ids, "attention_mask": mask}])
    x = model[0](ids)[mask.bool()].detach().double()
    want = torch.linalg.svd(x, full_matrices=False).Vh[:3]
    got = adapter.named_tensors()["inner.1.A"].detach().double()
    torch.testing.assert_close(got.T @ got, want.T @ want, rtol=0, atol=1e-5)
    assert adapter.report.calibration_tokens == 16


@pytest.mark.parametrize("tokens", [1, 2])
def test_eva_with_fewer_tokens_than_its_rank_has_no_dead_row(tokens: int) -> None:
    from earnest.adapters.conformance import tiny_llama

    model = tiny_llama()
    adapter = attach(model, EVA(6), calibration=[torch.arange(tokens)[None]])
    for a in (t for n, t in adapter.named_tensors().items() if n.endswith("q_proj.A")):
        torch.testing.assert_close(a @ a.T, torch.eye(6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("gain", ["elu", "delta"])
@pytest.mark.parametrize(("rank", "block"), [(4, 2), (8, 4), (None, 0), (6, 0)])
def test_antipasto_equals_the_residual_form(rank: int | None, block: int, gain: str) -> None:
    model, adapter, w, b = layer(AntiPaSTO(rank, block, gain=gain))
    perturb(adapter, std=0.2)
    t = tensors(adapter)
    k = rank or min(M, N)
    s = torch.linalg.svdvals(w)[:k]
    rest = w - t["U"] * s @ t["Vh"]
    gains = s + (s * nn.functional.elu(t["g"]) if gain == "elu" else t["g"])
    r = torch.eye(k, dtype=torch.float64)
    if block:
        limit = math.tan(0.25)
        rows, cols = torch.triu_indices(block, block, 1)
        for i, upper in enumerate(t["rot"]):
            x = torch.zeros(block, block, dtype=torch.float64)
            x[rows, cols] = upper
            x = x - x.T
            x = x * min(1.0, limit / float(x.norm() / math.sqrt(2)))
            eye = torch.eye(block, dtype=torch.float64)
            part = slice(i * block, (i + 1) * block)
            r[part, part] = torch.linalg.inv(eye - x) @ (eye + x)
    check(model, rest + t["U"] * gains @ r @ t["Vh"], b)


def test_antipastos_scale_is_a_signed_dose() -> None:
    """R(−c) = R(c)⁻¹, the paper's property."""
    _, adapter, _, _ = layer(AntiPaSTO(4, 2))
    slot = next(iter(adapter.slots.values()))
    with torch.no_grad():
        slot.rot.fill_(0.1)
    for c in (1.0, -1.0):
        adapter.scale = c
        f = slot.factors()
        assert f.core is not None
        r = f.core / slot.S.view(-1, 2, 1) + torch.eye(2)
        other = r if c < 0 else (first := r)
    torch.testing.assert_close(first @ other, torch.eye(2).expand(2, 2, 2))


@given(st.integers(2, 6), st.floats(0.05, 3.0), st.floats(0.01, 50.0), st.integers(0, 2**20))
@settings(max_examples=60)
def test_the_angle_bound_holds_for_the_whole_rotation(block: int, angle: float, size: float, seed: int) -> None:
    upper = size * torch.randn(2, block * (block - 1) // 2, generator=torch.Generator().manual_seed(seed))
    r = cayley_minus_identity(bounded(skew(upper, block), angle).double()) + torch.eye(block, dtype=torch.float64)
    torch.testing.assert_close(r @ r.transpose(-1, -2), torch.eye(block, dtype=torch.float64).expand_as(r))
    angles = torch.linalg.eigvals(r).angle().abs().max()
    assert float(angles) <= angle + 1e-5


@pytest.mark.parametrize("kind", ["road_1", "road_2", "road_4"])
def test_road_as_a_dense_matrix(kind: str) -> None:
    group, half = 4, 2
    model, adapter, w, b = layer(ROAD(kind, group))
    perturb(adapter, std=0.7)
    t = tensors(adapter)
    r = torch.zeros(M, M, dtype=torch.float64)
    for i in range(M):
        g, j = divmod(i, group)
        first, k = j < half, j % half
        if kind == "road_1":
            c = s = g * half + k
        elif kind == "road_2":
            c = s = i
        else:
            c, s = g * 2 * group + j, g * 2 * group + group + j
        r[i, i] = (1 + t["dalpha"][c]) * t["theta"][c].cos()
        partner = i + half if first else i - half
        r[i, partner] = (1 + t["dalpha"][s]) * t["theta"][s].sin() * (-1 if first else 1)
    assert b is not None
    check(model, r @ w, r @ b)


def test_oft_rotates_the_inputs() -> None:
    model, adapter, w, b = layer(OFT(4))
    perturb(adapter, std=0.5)
    t = tensors(adapter)
    r = torch.zeros(N, N, dtype=torch.float64)
    for i in range(2):
        q = skew(t["q"], 4)[i]
        eye = torch.eye(4, dtype=torch.float64)
        r[4 * i : 4 * i + 4, 4 * i : 4 * i + 4] = torch.linalg.inv(eye - q) @ (eye + q)
    torch.testing.assert_close(r @ r.T, torch.eye(N, dtype=torch.float64))
    check(model, w @ r.T, b)


def test_vera_and_its_shared_bases() -> None:
    model = nn.Sequential(nn.Linear(N, M), nn.Linear(M, 3))
    adapter = attach(model, VeRA(5, d_initial=0.3), targets=["0", "1"])
    a, b = (adapter.named_tensors()[f"{i}.A"] for i in (0, 1))
    assert torch.equal(a, b[:, :N])
    assert torch.equal(adapter.named_tensors()["0.B"][:3], adapter.named_tensors()["1.B"])
    model, adapter, w, bias = layer(VeRA(5, d_initial=0.3))
    perturb(adapter)
    t = tensors(adapter)
    check(model, w + t["lb"][:, None] * t["B"] * (0.3 + t["dld"]) @ t["A"], bias)


@pytest.mark.parametrize(
    "variant",
    [LoRA(4), PiSSA(4), DoRA(4), DeLoRA(4), IA3(), IA3FF(), HRA(4), AntiPaSTO(4), ROAD(group=4), OFT(4), VeRA(4)],
    ids=lambda v: v.name,
)  # fmt: skip
def test_deltas_and_their_operators(variant: Variant) -> None:
    model, adapter, w, _ = layer(variant)
    perturb(adapter)
    with torch.no_grad(), adapter.merged():
        want = model[0].weight.double() - w
    (_, delta), (_, operator) = next(adapter.deltas()), next(adapter.delta_operators())
    torch.testing.assert_close(delta.double(), want, rtol=0, atol=1e-6)
    v, u = torch.randn(N), torch.randn(M, 2)
    torch.testing.assert_close(operator.matvec(v), delta @ v, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(operator.rmatvec(u), delta.T @ u, rtol=1e-4, atol=1e-5)
    sigma = float(operator.matvec(operator.leading()[1]).norm())
    assert sigma == pytest.approx(float(torch.linalg.matrix_norm(delta, 2)), rel=1e-3)


@pytest.mark.parametrize("variant", [LoRA(4), IA3(), OFT(4), ROAD(group=4), VeRA(4)], ids=lambda v: v.name)
@pytest.mark.parametrize("scale", [0.5, -1.0])
def test_the_gate_is_linear_in_weight_space(variant: Variant, scale: float) -> None:
    _, adapter, _, _ = layer(variant)
    perturb(adapter)
    whole = next(adapter.deltas())[1]
    with adapter.scaled(scale):
        torch.testing.assert_close(next(adapter.deltas())[1], scale * whole, rtol=1e-5, atol=1e-6)


def test_weight_decay_pulls_to_the_base() -> None:
    """Many steps of weight decay alone: every variant with decay ends at the base, none at zero gains."""
    for variant in (PiSSA(4), IA3(), ROAD(group=4), OFT(4), AntiPaSTO(4), DoRA(4), DeLoRA(4), VeRA(4), LoRA(4)):
        model, adapter, w, b = layer(variant)
        perturb(adapter)
        with torch.no_grad():
            for p in adapter.decay_parameters():
                p.mul_(1e-6)
        check(model, w, b)
        assert {id(p) for p in adapter.decay_parameters()} == {id(p) for p in adapter.parameters()}
    _, adapter, _, _ = layer(HRA(4))
    assert adapter.decay_parameters() == [] and len(adapter.no_decay_parameters()) == 1


def test_small_steps_are_not_rounded_away_in_bf16() -> None:
    """Gains stored at 1.0 in bf16 would lose small steps: after twenty steps of 1e-4 every parameter has changed."""
    model = nn.Sequential(nn.Linear(N, M)).bfloat16()
    adapter = attach(model, IA3(), targets=["0"])
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-4)
    x = torch.randn(4, N).bfloat16()
    for _ in range(20):
        optimizer.zero_grad()
        model(x).float().pow(2).sum().backward()
        optimizer.step()
    (d,) = adapter.parameters()
    assert bool((d.abs() > 1e-3).all())


def test_deepcopy_is_independent() -> None:
    model, adapter, _, _ = layer(LoRA(2))
    perturb(adapter)
    twin = copy.deepcopy(model)
    x = torch.randn(2, N)
    before = twin(x)
    perturb(adapter, seed=9)
    assert torch.equal(twin(x), before) and not torch.equal(model(x), before)

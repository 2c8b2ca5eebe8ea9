"""Gates, stacks, mixed rows, merging, quantised layers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from earnest.adapters import (
    EVA,
    HRA,
    IA3,
    IA3FF,
    OFT,
    ROAD,
    AdapterError,
    AntiPaSTO,
    DeLoRA,
    DoRA,
    LoRA,
    PiSSA,
    VeRA,
    attach,
    linalg,
    rows,
)
from earnest.adapters.conformance import perturb, tiny_gpt2, tiny_llama
from earnest.adapters.variant import Variant

IDS = torch.randint(0, 64, (4, 7), generator=torch.Generator().manual_seed(0))
ALL: list[Variant] = [
    LoRA(4), PiSSA(4), DoRA(4), DeLoRA(4), IA3(), IA3FF(), HRA(4), EVA(4), AntiPaSTO(8), ROAD(group=8), OFT(8), VeRA(8),
]  # fmt: skip


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def put(model: nn.Module, variant: Variant, seed: int = 3, **kwargs):
    adapter = attach(model, variant, calibration=[IDS] if variant.wants_calibration() else None, **kwargs)
    perturb(adapter, seed=seed)
    return adapter


def test_off_and_scaled_nest_and_survive_exceptions() -> None:
    model = tiny_llama().eval()
    base = logits(model)
    adapter = put(model, LoRA(4))
    full = logits(model)
    with adapter.scaled(0.5):
        half = logits(model)
        with adapter.off():
            assert torch.equal(logits(model), base)
            with adapter.off():
                assert torch.equal(logits(model), base)
            assert torch.equal(logits(model), base)
        assert torch.equal(logits(model), half)
    assert torch.equal(logits(model), full)
    assert not torch.equal(half, full)
    with pytest.raises(ZeroDivisionError), adapter.off():
        _ = 1 / 0
    assert adapter.scale == 1.0 and torch.equal(logits(model), full)
    with pytest.raises(AdapterError, match="finite"):
        adapter.scale = float("nan")


@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.name)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def test_different_adapters_for_different_rows(variant: Variant, make) -> None:
    """Each row equals a batch with its adapter alone; gates are restored; gradients reach only their rows' adapters."""
    model = make().eval()
    base = logits(model)
    first, second = put(model, variant, name="first"), put(model, LoRA(2), seed=8, name="second")
    with second.off():
        only_first = logits(model)
    with first.off():
        only_second = logits(model)
    both = logits(model)
    with rows(model, [first, None, second, (first, second)]):
        mixed = logits(model)
        model(IDS).logits[1].float().pow(2).sum().backward()
        quiet = [p.grad for p in [*first.parameters(), *second.parameters()] if p.grad is not None and p.grad.any()]
        assert not quiet
        model(IDS).logits[0].float().pow(2).sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in first.parameters())
        assert not any(p.grad is not None and bool(p.grad.any()) for p in second.parameters())
    want = torch.stack([only_first[0], base[1], only_second[2], both[3]])
    torch.testing.assert_close(mixed, want, rtol=0, atol=2e-5)
    assert not torch.allclose(want[0], base[0], atol=1e-3) and not torch.allclose(want[2], base[2], atol=1e-3)
    assert torch.equal(logits(model), both)


def test_rows_refuses_wrong_lengths_and_foreign_adapters() -> None:
    model = tiny_llama().eval()
    adapter, stranger = put(model, LoRA(2)), put(tiny_llama(), LoRA(2))
    with pytest.raises(AdapterError, match="given 3 rows"), rows(model, [adapter, None, adapter]):
        logits(model)
    with pytest.raises(AdapterError, match="another model"), rows(model, [stranger]):
        pass
    with rows(model, [adapter, None, None, None]), pytest.raises(AdapterError, match="merge outside"):
        adapter.merge()


@pytest.mark.parametrize("below", ALL, ids=lambda v: v.name)
def test_two_variants_on_one_model_merge_to_what_they_compute(below: Variant) -> None:
    """Every variant under two others (an output-side and an input-side one), on layers with biases."""
    model = tiny_gpt2().eval()
    stack = [put(model, below, targets=["c_attn"]), put(model, ROAD(group=8), 5, targets=["c_attn"])]
    stack.append(put(model, OFT(8), 6, targets=["c_attn"]))
    here = logits(model)
    with torch.no_grad(), stack[0].merged():
        torch.testing.assert_close(logits(model), here, rtol=0, atol=3e-5)
    assert torch.equal(logits(model), here)
    for adapter in stack:
        adapter.detach()
    assert torch.equal(logits(model), logits(tiny_gpt2().eval()))


def test_iterated_rounds_freeze_their_history() -> None:
    """Round k trains on top of rounds 1…k−1: earlier adapters have no gradient and do not change; the base stays
    frozen."""
    model = tiny_llama()
    history, marks = [], []
    for round_ in range(3):
        adapter = attach(model, LoRA(2), seed=round_)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
        for old, mark in zip(history, marks, strict=True):
            assert all(torch.equal(v, mark[k]) for k, v in old.state_dict().items())
            assert all(t.grad is None for t in old.named_tensors().values())
        adapter.freeze()
        assert adapter.parameters() == []
        history.append(adapter)
        marks.append(adapter.state_dict())
    assert [a.name for a in history] == ["default", "adapter1", "adapter2"]
    for adapter in (history[1], history[0], history[2]):
        assert not any(p.requires_grad for n, p in model.named_parameters())
        adapter.detach()
    assert all(p.requires_grad for p in model.parameters())


def test_names_are_unique() -> None:
    model = tiny_llama()
    attach(model, LoRA(2), name="one")
    with pytest.raises(AdapterError, match="already has an adapter 'one'"):
        attach(model, LoRA(2), name="one")


def test_merged_layers_refuse_gradients_scales_and_new_adapters() -> None:
    model = tiny_llama().eval()
    adapter = put(model, LoRA(2))
    with adapter.merged():
        with pytest.raises(AdapterError, match="no gradient"):
            model(IDS)
        with pytest.raises(AdapterError, match="unmerge"), adapter.off():
            pass
        with pytest.raises(AdapterError, match="merged already"):
            adapter.merge()
        with pytest.raises(AdapterError, match="is merged; unmerge"):
            attach(model, LoRA(2))
    with pytest.raises(AdapterError, match="changed while merged"), adapter.merged():
        perturb(adapter, seed=12)
    with pytest.raises(AdapterError, match="not merged"):
        adapter.unmerge()
    adapter.merge()
    adapter.detach()
    assert torch.equal(logits(model), logits(tiny_llama().eval()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [LoRA(4), DeLoRA(4), HRA(4), VeRA(8), AntiPaSTO(8)], ids=lambda v: v.name)
def test_merge_rounds_once(variant: Variant, dtype: torch.dtype) -> None:
    model = tiny_llama().to(dtype).eval()
    adapter = put(model, variant)
    path, slot = next(iter(adapter.slots.items()))
    exact = slot.layer.weight() + next(adapter.deltas())[1]
    report = adapter.merge_report()[path]
    with torch.no_grad(), adapter.merged():
        assert torch.equal(slot.layer.module.weight, exact.to(dtype))
    assert 0 < report["rounding"] < 0.1 and report["change"] > 0.02


# -- quantised and other linear-like layers ----------------------------------------------------------------------------
class Opaque(nn.Module):
    """A linear layer of another library: no dense weight, int8 inside."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def opaque_model() -> nn.Module:
    model = tiny_llama().eval()
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(block.self_attn, name, Opaque(getattr(block.self_attn, name)))
        block.mlp.down_proj = Opaque(block.mlp.down_proj)
    return model


def torchao_model() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own import-time notes
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model = tiny_llama().eval()
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, n: isinstance(m, nn.Linear) and "lm_head" not in n)
    return model


def dense_twin(model: nn.Module) -> nn.Module:
    """The same map with dense weights, read through the layers' forward."""
    from earnest.adapters.layer import Layer

    twin = tiny_llama().eval()
    for name, module in model.named_modules():
        if isinstance(module, (Opaque, nn.Linear)) and "lm_head" not in name:
            with torch.no_grad():
                twin.get_submodule(name).weight.copy_(Layer(name, module).weight())
    return twin


@pytest.mark.parametrize(
    "make", [opaque_model, pytest.param(torchao_model, marks=pytest.mark.integration)], ids=["opaque", "torchao-int8"]
)
@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.name)
def test_quantised_layers(variant: Variant, make) -> None:
    """Identity, gradients and values equal the same adapter on the dequantised model; merging is refused with the
    reason."""
    model = make()
    base = logits(model)
    calibration = [IDS] if variant.wants_calibration() else None
    adapter = attach(model, variant, calibration=calibration)
    assert adapter.report.kinds == ("opaque",)
    assert torch.equal(logits(model), base)
    perturb(adapter)
    twin = dense_twin(make())
    other = attach(twin, variant, calibration=calibration)
    other.load_state_dict(adapter.state_dict())
    torch.testing.assert_close(logits(model), logits(twin), rtol=0, atol=5e-5)
    model(IDS, labels=IDS).loss.backward()
    twin(IDS, labels=IDS).loss.backward()
    for p, q in zip(adapter.parameters(), other.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and bool(p.grad.any())
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    with pytest.raises(AdapterError, match="quantised"):
        adapter.merge()
    adapter.detach()
    assert torch.equal(logits(model), base)


class Clipped(Opaque):
    """Quantises its activations: not a linear map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-0.1, 0.1).sign() * 0.5)


def test_a_layer_that_is_not_linear_is_refused_where_its_weight_is_needed() -> None:
    model = nn.Sequential(Clipped(nn.Linear(8, 8)))
    with pytest.raises(AdapterError, match=r"not a linear map.*lora"):
        attach(model, PiSSA(2), targets=["0"])
    assert attach(model, LoRA(2), targets=["0"]).report.kinds == ("opaque",)


@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.name)
def test_autocast_changes_a_call_and_nothing_else(variant: Variant) -> None:
    """Gradients are close to those of fp32, and values derived inside autocast are not cached."""
    model = tiny_llama().eval()
    adapter = put(model, variant)
    model(IDS, labels=IDS).loss.backward()
    wanted = [p.grad.clone() for p in adapter.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits(model)
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    after = logits(model)
    for p, want in zip(adapter.parameters(), wanted, strict=True):
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert float((p.grad - want).norm()) <= 0.1 * float(want.norm())
    fresh = tiny_llama().eval()
    put(fresh, variant)
    assert torch.equal(after, logits(fresh))


def test_training_works_after_inference_mode() -> None:
    """Tensors shared by all layers are created outside inference mode: training continues after an evaluation in it."""
    linalg._PLACES.clear()
    model = tiny_llama().eval()
    adapter = put(model, OFT(8))
    with torch.inference_mode():
        model(IDS)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in adapter.parameters())


def test_per_sample_gradients_of_a_cached_variant() -> None:
    """Under torch.func the tensors have no address, so nothing is cached there."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    adapter = attach(model, DoRA(2), targets=["0"])
    perturb(adapter)
    own = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(3, 4)

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(own, x)
    for i in range(3):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(got[name][i], p.grad)


@pytest.mark.parametrize("variant", [DeLoRA(4), DoRA(4), OFT(8), ROAD(group=8), HRA(4)], ids=lambda v: v.name)
def test_functional_call_sees_the_parameters_it_is_given(variant: Variant) -> None:
    """torch.func replaces parameters for a call: a cache of the old ones would ignore them without an error."""
    model = tiny_llama().eval()
    adapter = put(model, variant)
    named = dict(model.named_parameters())
    own = {id(p) for p in adapter.parameters()}
    swapped = {n: torch.zeros_like(p) if id(p) in own else p for n, p in named.items()}
    logits(model)
    with torch.no_grad():
        got = torch.func.functional_call(model, swapped, (IDS,), tie_weights=False).logits
    assert torch.equal(got, logits(tiny_llama().eval()))

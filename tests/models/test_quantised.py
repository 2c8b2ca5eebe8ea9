"""A base in 8 or 4 bits: the codes, the map and its gradient, training on it, saving, resuming, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import earnest as en
from earnest.adapters import AdapterError, attach
from earnest.config import from_mapping, recipes
from earnest.engines.packing import balance_of
from earnest.errors import ConfigError
from earnest.models.quantised import LEVELS, QuantisedLinear, quantise, stored_bytes
from earnest.runs.setup import build

KINDS = ("int8", "nf4")
Kind = Literal["int8", "nf4"]


def linear(n: int = 96, m: int = 40, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(n, m, bias=bias, dtype=dtype)


def dense(layer: QuantisedLinear) -> nn.Linear:
    twin = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.compute_dtype)
    with torch.no_grad():
        twin.weight.copy_(layer.dequantised())
        if layer.bias is not None:
            twin.bias.copy_(layer.bias)
    return twin


@pytest.mark.integration
def test_nf4_is_torchaos() -> None:
    """The same table and the same codes; torchao also rounds the scales, which moves a weight by a percent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import NF4Tensor
    weight = linear(128, 128).weight.detach()
    layer = QuantisedLinear(linear(128, 128), "nf4")
    theirs = NF4Tensor.from_tensor(weight, 64, 256)
    torch.testing.assert_close(torch.tensor(LEVELS), theirs.nf4.float(), rtol=0, atol=1e-4)  # theirs has 4 digits
    codes = theirs.quantized_data.flatten()
    assert float((layer.codes != codes).float().mean()) < 0.001
    off = layer.dequantised() - theirs.get_original_weight()
    assert float(off.norm()) < 0.01 * float(weight.norm())


@pytest.mark.integration
def test_int8_is_torchaos() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    theirs = nn.Sequential(linear())
    quantize_(theirs, Int8WeightOnlyConfig())
    ours = QuantisedLinear(linear(), "int8").dequantised()
    torch.testing.assert_close(ours, theirs[0].weight.dequantize(), rtol=0, atol=float(ours.abs().max()) / 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_dequantised_twin(kind: Kind, dtype: torch.dtype) -> None:
    layer = QuantisedLinear(linear(dtype=dtype), kind)
    twin = dense(layer)
    inputs = [torch.randn(2, 5, 96, dtype=dtype, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    for x in inputs:
        x.requires_grad_()
    got, want = layer(inputs[0]), twin(inputs[1])
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)
    for x, y in zip(inputs, (got, want), strict=True):
        y.square().sum().backward()
        assert x.grad is not None and bool(x.grad.any())
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("nf4", 0.15)])
def test_the_rounding_is_small_and_odd_sizes_fit(kind: Kind, most: float) -> None:
    source = linear(37, 11, bias=False)
    layer = QuantisedLinear(source, kind)
    off = (layer.dequantised() - source.weight).norm() / source.weight.norm()
    assert 0 < off < most
    zero = linear(64, 2, bias=False)
    nn.init.zeros_(zero.weight)
    assert not QuantisedLinear(zero, kind).dequantised().any()


def test_no_dense_weight_is_kept_for_the_backward_pass() -> None:
    layer, kept = QuantisedLinear(linear(), "nf4"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(3, 96, requires_grad=True))
    assert kept and all(t.dtype == torch.uint8 or t.numel() * 64 <= layer.numel + 64 for t in kept)


@pytest.fixture(scope="module", params=KINDS)
def policy(request: pytest.FixtureRequest) -> en.Policy:
    return en.load("nano", dtype=request.param)


def twin_of(policy: en.Policy) -> en.Policy:
    twin = en.load("nano")
    for name, module in policy.model.named_modules():
        if isinstance(module, QuantisedLinear):
            with torch.no_grad():
                twin.model.get_submodule(name).weight.copy_(module.dequantised())
    return twin


def batch() -> en.Batch:
    return en.Batch.from_rows([[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]], role="demonstration")


def test_training_on_it_is_training_on_the_dequantised_model(policy: en.Policy) -> None:
    """Forward, gradient of an adapter, and 3 updates; the base does not change."""
    engines = []
    before = policy.fingerprint()
    for each in (policy, twin_of(policy)):
        adapter = attach(each, en.LoRA(rank=4), targets="all-linear")
        engines.append(en.LocalEngine(each, adapter, pack=False))
    gradients = [e.gradients(batch(), en.SFT()) for e in engines]
    for name, g in gradients[0].items():
        torch.testing.assert_close(g, gradients[1][name], rtol=1e-3, atol=1e-6)
    for _ in range(3):
        reports = [e.step(batch(), en.SFT()) for e in engines]
        assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-4)
    quantised, dequantised = (e.adapter.state_dict() for e in engines)
    assert all(torch.allclose(t, dequantised[n], atol=2e-4) for n, t in quantised.items())
    assert policy.fingerprint(fresh=True) == before
    engines[0].adapter.detach()


def test_sizes_and_what_is_left_alone(policy: en.Policy) -> None:
    plain = en.load("nano")
    assert policy.parameters == plain.parameters
    assert balance_of(policy) == balance_of(plain), "rows are packed as on the dense model"
    bits = {"int8": 8, "nf4": 4.5}[policy.notes[-1].split(":")[0].rsplit(" ", 1)[-1]]
    packed = sum(m.numel for m in policy.model.modules() if isinstance(m, QuantisedLinear))
    stored = sum(m.codes.nbytes + m.scale.nbytes for m in policy.model.modules() if isinstance(m, QuantisedLinear))
    assert stored == pytest.approx(packed * bits / 8, rel=0.04)
    assert stored_bytes(plain.model) - stored_bytes(policy.model) == 4 * packed - stored
    assert "became" in policy.notes[-1]
    assert type(policy.model.get_output_embeddings()) is nn.Linear


def test_merging_and_training_all_weights_are_refused(policy: en.Policy) -> None:
    adapter = attach(policy, en.LoRA(rank=4))
    with pytest.raises(AdapterError, match="quantised"):
        adapter.merge()
    adapter.detach()
    with pytest.raises(AdapterError, match=r"is quantised .* an adapter such as lora"):
        attach(policy, en.Full())
    with pytest.raises(ConfigError, match="a base in nf4 is not sharded"):
        from_mapping(recipes.read("quickstart")[1], ["dtype=nf4", "engine.shard=2"])


def test_an_adapter_comes_back_on_the_same_base(policy: en.Policy, tmp_path: Path) -> None:
    adapter = attach(policy, en.LoRA(rank=4))
    engine = en.LocalEngine(policy, adapter)
    engine.step(batch(), en.SFT())
    engine.save(tmp_path / "checkpoint")
    adapter.save(tmp_path / "adapter")
    ids = torch.arange(8)[None]
    want = policy.model(ids).logits
    adapter.detach()
    again = en.load_adapter(policy, tmp_path / "adapter")
    assert torch.equal(policy.model(ids).logits, want)
    again.detach()
    resumed = en.LocalEngine(policy, attach(policy, en.LoRA(rank=4)))
    resumed.load(tmp_path / "checkpoint")
    assert torch.equal(policy.model(ids).logits, want) and resumed.version == 1
    resumed.adapter.detach()
    if next(m.kind for m in policy.model.modules() if isinstance(m, QuantisedLinear)) == "nf4":
        other = en.load("nano")
        with pytest.raises(AdapterError, match="other base"):
            en.load_adapter(other, tmp_path / "adapter")


def test_a_recipe_trains_on_it() -> None:
    small: Any = ["sampling.prompts_per_step=2", "sampling.completions_per_prompt=2", "dtype=nf4"]
    setup = build(from_mapping(recipes.read("quickstart")[1], small), lambda _: None)
    quantised = [m for m in setup.require_local("the test").policy.model.modules() if isinstance(m, QuantisedLinear)]
    assert len(quantised) == 4 * 7
    assert not setup.adapter.mergeable


def test_quantising_leaves_a_model_that_has_no_linear_layers_alone() -> None:
    note = quantise(nn.Sequential(nn.LayerNorm(4)), "int8")
    assert note.endswith("0.0 MB")

"""Targets, transactions, reports, kinds of layers."""

from __future__ import annotations

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
)
from earnest.adapters.conformance import CHECKS, Case, perturb, tiny_gpt2, tiny_llama
from earnest.adapters.variant import Variant, get_variant, list_variants
from tests.adapters.test_gates import ALL

IDS = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def snapshot(model: nn.Module):
    return (
        {n: t.clone() for n, t in model.state_dict().items()},
        {n: p.requires_grad for n, p in model.named_parameters()},
        {n: type(m) for n, m in model.named_modules()},
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def same(a, b) -> bool:
    return all(torch.equal(a[0][n], b[0][n]) for n in a[0]) and a[0].keys() == b[0].keys() and a[1:] == b[1:]


@pytest.mark.parametrize(
    ("targets", "layers", "message"),
    [
        (["foo"], None, r"'foo' matches no linear layer of \w+; the linear layers are: .*q_proj"),
        (["q_prj"], None, r"'q_prj' matches no linear layer.*near misses: q_proj"),
        (["q_proj", "nothing_like_it"], None, "the linear layers are: .*down_proj"),
        (["self_attn"], None, "LlamaAttention.*target the linears in it"),
        (["input_layernorm"], None, "not a linear layer"),
        (["q_proj"], [7], "layer 7 does not exist; the model has layers 0–1"),
        (["q_proj"], [], "layers is empty"),
        ([], None, "targets is empty"),
        (["model.layers.0.self_attn.q_proj"], [1], "only in others"),
        (["model.layers.0.self_attn.q_proj", "lm_head"], [0, 1], r"no target in layer\(s\) \[1\]"),
    ],
)
def test_targets_that_match_nothing_are_refused(targets, layers, message: str) -> None:
    model = tiny_llama()
    before = snapshot(model)
    with pytest.raises(AdapterError, match=message):
        attach(model, LoRA(2), targets=targets, layers=layers)
    assert same(before, snapshot(model))


def test_the_report_counts_each_pattern() -> None:
    adapter = attach(tiny_llama(), LoRA(2), targets=["q_proj", "mlp.down_proj", "lm_head"], layers=[-1])
    assert [(m.pattern, len(m.modules)) for m in adapter.report.matches] == [
        ("q_proj", 1),
        ("mlp.down_proj", 1),
        ("lm_head", 1),
    ]
    text = str(adapter.report)
    assert "q_proj: 1 modules in 1 of 2 blocks" in text and "no gradient at step 1, by design: A" in text
    assert adapter.report.trainable == sum(p.numel() for p in adapter.parameters())


def test_all_linear_leaves_the_head_and_regexes_match_whole_paths() -> None:
    assert len(attach(tiny_llama(), LoRA(2), targets="all-linear").slots) == 14
    assert list(attach(tiny_llama(), LoRA(2), targets=r"re:.*\.1\..*k_proj").slots) == [
        "model.layers.1.self_attn.k_proj"
    ]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (PiSSA(17), "exceeds .*v_proj's 16"),  # fits q_proj and not v_proj: it fails half-way
        (AntiPaSTO(32), "choose rank ≤ 16"),
        (AntiPaSTO(6, 4), "does not divide the rank"),
        (ROAD(group=32), "does not divide the 16 outputs"),
        (OFT(5), "does not divide the 32 inputs"),
        (EVA(4), "pass calibration="),
    ],
)
def test_a_failed_attach_leaves_the_model_bit_equal(variant: Variant, message: str) -> None:
    model = tiny_llama()
    before = snapshot(model)
    with pytest.raises(AdapterError, match=message):
        attach(model, variant)
    assert same(before, snapshot(model))
    assert attach(model, LoRA(2)).name == "default"


def test_a_failure_while_installing_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("earnest.adapters.attach")
    real, calls = module.install, []

    def install(slot) -> None:
        calls.append(slot)
        if len(calls) == 3:
            raise RuntimeError("the third layer fails")
        real(slot)

    model = tiny_llama()
    before = snapshot(model)
    monkeypatch.setattr(module, "install", install)
    with pytest.raises(RuntimeError, match="third"):
        attach(model, LoRA(2))
    assert same(before, snapshot(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRA(0), "rank: must be a whole number at least 1, got 0"),
        (lambda: LoRA(4, alpha=0), "alpha: must be a finite number above 0, got 0"),
        (lambda: HRA(3), "must be a whole number at least 2 and a multiple of 2, got 3"),
        (lambda: DeLoRA(init="half"), "frozen_copy"),
        (lambda: AntiPaSTO(gain="x"), "gain: must be 'elu' or 'delta'"),
        (lambda: AntiPaSTO(block=1), "block must be"),
        (lambda: AntiPaSTO(max_angle=4.0), "max_angle"),
        (lambda: AntiPaSTO(select="activity", niter=2), "niter"),
        (lambda: ROAD("road_3"), "'road_1' or 'road_2' or 'road_4'"),
        (lambda: VeRA(d_initial=0.0), "without a gradient"),
        (lambda: get_variant("lorra"), "did you mean 'lora'"),
        (lambda: get_variant("lora", rnak=3), "did you mean 'rank'"),
        (lambda: attach(tiny_llama(), "lora"), "such as LoRA"),
        (lambda: attach(object(), LoRA(2)), "policy or a torch module"),
        (lambda: attach(tiny_llama(), LoRA(2), calibration=[IDS]), "would have no effect"),
        (lambda: attach(nn.Sequential(nn.Linear(2, 2)), LoRA(2)), "no default targets"),
    ],
)
def test_wrong_settings_say_what_is_allowed(make, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        make()


def test_attach_takes_a_policy() -> None:
    class Policy:
        model = tiny_llama()

    assert attach(Policy(), LoRA(2)).model is Policy.model


def test_initial_tensors_depend_on_seed_and_layer_only() -> None:
    a = attach(tiny_llama(), LoRA(2), targets=["q_proj"], seed=1).state_dict()
    b = attach(tiny_llama(), LoRA(2), targets=["q_proj", "v_proj"], seed=1).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    c = attach(tiny_llama(), LoRA(2), targets=["q_proj"], seed=2).state_dict()
    assert not torch.equal(a["model.layers.0.self_attn.q_proj.A"], c["model.layers.0.self_attn.q_proj.A"])
    assert not torch.equal(a["model.layers.0.self_attn.q_proj.A"], a["model.layers.1.self_attn.q_proj.A"])


TARGETS = {"ffn": ["gate_proj", "down_proj"], "head": ["lm_head"], "all": "all-linear"}


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize(
    "variant",
    [LoRA(4), PiSSA(4), DoRA(4), DeLoRA(4), IA3(), IA3FF(), HRA(4), AntiPaSTO(8), ROAD(group=8), OFT(8), VeRA(8)],
    ids=lambda v: v.name,
)  # fmt: skip
def test_ffn_tied_head_and_every_layer(variant: Variant, where: str) -> None:
    case = Case(variant, tiny_llama, targets=TARGETS[where])
    for check in ("identity", "gradients", "merging", "saving"):
        CHECKS[check](case)


def test_merging_a_tied_head_leaves_the_embedding() -> None:
    model = tiny_llama().eval()
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    adapter = attach(model, LoRA(4), targets=["lm_head"])
    perturb(adapter)
    bits = embedding.detach().clone()
    with torch.no_grad(), adapter.merged():
        assert model.get_input_embeddings().weight is embedding and torch.equal(embedding, bits)
        assert not torch.equal(model.lm_head.weight, bits)
    assert model.lm_head.weight is embedding


def test_gpt2_defaults_find_conv1d() -> None:
    adapter = attach(tiny_gpt2(), LoRA(2))
    assert adapter.report.kinds == ("conv1d",) and len(adapter.slots) == 2
    assert list(attach(tiny_gpt2(), IA3FF()).slots) == ["transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj"]


def test_modules_whose_forward_would_be_bypassed_are_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2)
            self.proj = nn.Linear(8, 8)

    with pytest.raises(AdapterError, match="does not call forward"):
        attach(Block(), LoRA(2), targets=["out_proj"])
    block = Block()
    block.proj.forward = block.proj.forward
    with pytest.raises(AdapterError, match="hide the adapter"):
        attach(block, LoRA(2), targets=["proj"])


@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.name)
def test_a_model_cast_after_attach_keeps_fp32_parameters(variant: Variant) -> None:
    """It runs in the new dtype, with and without a gradient, and merges into it."""
    model = tiny_llama().eval()
    adapter = attach(model, variant, calibration=[IDS] if variant.wants_calibration() else None)
    perturb(adapter)
    bits = adapter.state_dict()
    model.bfloat16()
    after = adapter.state_dict()
    assert all(torch.equal(bits[k], after[k]) and after[k].dtype == bits[k].dtype for k in bits)
    plain = logits(model)
    assert plain.dtype == torch.bfloat16
    model(IDS).logits.float().sum().backward()
    assert all(p.grad is not None for p in adapter.parameters())
    with torch.no_grad(), adapter.merged():
        torch.testing.assert_close(logits(model), plain, rtol=0.1, atol=0.1)


def test_calibration_puts_every_mode_back() -> None:
    model = tiny_llama().train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    attach(model, EVA(2), calibration=[IDS])
    inner = [m for n, m in model.named_modules() if "earnest_slots" not in n]
    assert [m.training for m in inner] == modes


def test_additional_arguments_reach_the_layer() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor, gain: float = 1.0) -> Tensor:
            return super().forward(input) * gain

    model = nn.Sequential(Scaled(4, 4))
    x = torch.randn(2, 4)
    before = model[0](x, gain=3.0)
    attach(model, LoRA(2), targets=["0"])
    assert torch.equal(model[0](x, gain=3.0), before) and torch.equal(model[0](input=x, gain=3.0), before)


def test_keyword_calls_reach_the_adapter() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    adapter = attach(model, LoRA(2), targets=["0"])
    perturb(adapter)
    x = torch.randn(2, 4)
    assert torch.equal(model[0](input=x), model[0](x))


def test_the_list_of_variants_has_every_declaration() -> None:
    rows = list_variants()
    names = [r["name"] for r in rows]
    wanted = {"lora", "pissa", "dora", "delora", "ia3", "ia3_ff", "hra", "eva", "antipasto", "road", "oft", "vera"}
    assert wanted <= set(names)
    assert all(r["paper"].startswith("arXiv 2") and r["equation"] and r["reference"] and r["lr_source"] for r in rows)


@pytest.mark.parametrize("name", ["lora", "dora", "pissa", "delora", "hra", "eva"])
def test_a_rank_above_the_width_of_a_layer_is_refused(name: str) -> None:
    """Such a rank adds parameters without effect; it is nearly always a typing error."""
    variant = get_variant(name, rank=1000)
    with pytest.raises(AdapterError, match=rf"{name}: rank 1000 exceeds .* choose rank ≤ "):
        attach(tiny_llama(), variant, calibration=[IDS] if variant.wants_calibration() else None)

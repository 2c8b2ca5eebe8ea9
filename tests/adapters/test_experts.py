"""LoRA on a mixture of experts: tiny random Qwen3-MoE and Mixtral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import earnest as en
from earnest.adapters import VARIANTS, AdapterError, attach, load_adapter
from earnest.adapters.conformance import perturb
from earnest.errors import SignalError
from earnest.signals import EMATeacher
from tests.engines.words import word_tokenizer

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
TARGETS = ["q_proj", "experts"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def qwen() -> nn.Module:
    torch.manual_seed(0)
    own = {"num_experts": 6, "moe_intermediate_size": 16, "intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **own)).eval()


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=16)).eval()


MODELS = pytest.mark.parametrize("make", [qwen, mixtral], ids=["qwen3-moe", "mixtral"])


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


@MODELS
def test_it_starts_as_the_base_and_ends_as_the_base(make: Any) -> None:
    model = make()
    base = logits(model)
    adapter = attach(model, en.LoRA(rank=3), targets=TARGETS)
    assert torch.equal(logits(model), base)
    experts = [n for n in adapter.named_parameters() if ".experts." in n]
    assert len(experts) == 2 * 2 * 2 and {n.rsplit(".", 1)[-1] for n in experts} == {
        "gate_up_proj_A", "gate_up_proj_B", "down_proj_A", "down_proj_B",
    }  # fmt: skip
    assert {n for n in adapter.inactive_at_initialization() if "experts" in n} == {
        n for n in experts if n.endswith("_A")
    }
    perturb(adapter)
    changed = logits(model)
    assert not torch.allclose(changed, base, atol=1e-3)
    with adapter.off():
        assert torch.equal(logits(model), base)
    with adapter.merged():
        torch.testing.assert_close(logits(model), changed, rtol=0, atol=1e-5)
    adapter.detach()
    assert torch.equal(logits(model), base)


def one_expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = (x @ up.T).chunk(2)
    return (nn.functional.silu(gate) * value) @ down.T


@MODELS
def test_the_gradient_is_that_of_each_expert_alone(make: Any) -> None:
    """The block against a loop over tokens and their experts, each a small network with W + s·B A of its own."""
    model = make()
    lora = en.LoRA(rank=3, alpha=5.0)
    adapter = attach(model, lora, targets=["experts"])
    perturb(adapter)
    path, slot = next(iter(adapter.slots.items()))
    block, count = slot.layer.module, slot.layer.stacks()["down_proj"].shape[0]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(7, 32, generator=g)
    chosen = torch.stack([torch.randperm(count - 1, generator=g)[:2] for _ in range(7)])  # the last one gets no token
    shares, outward = torch.rand(7, 2, generator=g), torch.randn(7, 32, generator=g)
    block(x, chosen, shares).backward(outward)
    own = {n: p.detach().clone().requires_grad_() for n, p in slot.tensors.items()}
    base = {n: p.detach() for n, p in slot.layer.stacks().items()}
    out = torch.zeros(7, 32)
    for token in range(7):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            made = {n: w[expert] + 5.0 / 3 * own[f"{n}_B"][expert] @ own[f"{n}_A"][expert] for n, w in base.items()}
            out[token] = out[token] + share * one_expert(x[token], made["gate_up_proj"], made["down_proj"])
    out.backward(outward)
    for name, p in slot.tensors.items():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, own[name].grad, rtol=1e-4, atol=1e-6)
        assert bool(p.grad[:-1].any()) and not p.grad[-1].any(), (path, name)


@MODELS
def test_saved_and_loaded_it_is_the_same(make: Any, tmp_path: Path) -> None:
    model = make()
    adapter = attach(model, en.LoRA(rank=3), targets=TARGETS)
    perturb(adapter)
    want, state = logits(model), adapter.state_dict()
    adapter.save(tmp_path)
    again = load_adapter(make_again := make(), tmp_path)
    assert torch.equal(logits(make_again), want)
    assert all(torch.equal(t, state[n]) for n, t in again.state_dict().items())
    with pytest.raises(AdapterError, match="no form for the experts"):
        adapter.export_lora(tmp_path / "lora")


@pytest.mark.integration
@MODELS
def test_peft_reads_it(make: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model = make()
    adapter = attach(model, en.LoRA(rank=3), targets=TARGETS)
    perturb(adapter)
    adapter.save(tmp_path)
    theirs = PeftModel.from_pretrained(make(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=1e-5)


@pytest.mark.integration
@MODELS
def test_pefts_own_files_are_read(make: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    names = ["experts.gate_up_proj", "experts.down_proj"]
    theirs = get_peft_model(make(), LoraConfig(r=3, target_modules=["q_proj"], target_parameters=names)).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    theirs.save_pretrained(str(tmp_path))
    model = make()
    adapter = load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=1e-5)
    assert sum(slot.of_experts for slot in adapter.slots.values()) == 2
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"experts.down_proj",', "").replace(',\n    "experts.down_proj"', ""))
    with pytest.raises(AdapterError, match=r"target_parameters leaves .* out"):
        load_adapter(make(), tmp_path)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"lora", "full"}))
def test_other_adapters_refuse_experts(name: str) -> None:
    model = qwen()
    settings = next(iter(VARIANTS[name].examples.values()), {})
    calibration = [IDS] if VARIANTS[name](**settings).wants_calibration() else None
    with pytest.raises(AdapterError, match=rf"3-D parameters, and {name} has no form for them; use lora"):
        attach(model, VARIANTS[name](**settings), targets=["experts"], calibration=calibration)


def test_all_linear_leaves_experts_out() -> None:
    adapter = attach(qwen(), en.LoRA(rank=2), targets="all-linear")
    assert not any(slot.of_experts for slot in adapter.slots.values())


def test_a_step_on_experts_is_proven() -> None:
    """One row of few tokens leaves experts idle; nothing is reported for them."""
    policy = en.Policy.of(qwen(), word_tokenizer(64))
    adapter = attach(policy, en.LoRA(rank=2), targets=["experts"])
    engine = en.LocalEngine(policy, adapter)
    batch = en.Batch.from_rows([[5, 6], [7]], [[10, 11], [12]], role="demonstration")
    before = adapter.state_dict()
    proof = en.prove(engine, en.SFT(), batch)
    assert proof.holds, str(proof)
    engine.step(batch, en.SFT())
    assert any(not torch.equal(t, before[n]) for n, t in adapter.state_dict().items())
    with pytest.raises(SignalError, match="no form for the experts"):
        EMATeacher(adapter)

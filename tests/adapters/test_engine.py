"""The settings of an engine that depend on its adapter: merging for sampling, and the learning rate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import earnest as en
from earnest import cli
from earnest.adapters import IA3, Adapter, LoRA, attach
from earnest.adapters.conformance import SUBJECTS, perturb, tiny_llama
from earnest.adapters.variant import get_variant, list_variants
from earnest.engines import LogProbsWanted
from tests.adapters.test_gates import opaque_model, torchao_model
from tests.engines.words import word_tokenizer

SPEC = en.SampleSpec(max_new_tokens=8, seed=3)
PROMPTS = [[5, 6, 7], [9, 8]]


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Adapter]:
    """Records every adapter that is merged."""
    seen: list[Adapter] = []
    real = Adapter.merge

    def merge(self: Adapter) -> None:
        seen.append(self)
        real(self)

    monkeypatch.setattr(Adapter, "merge", merge)
    return seen


def mixed_model() -> nn.Module:
    """One quantised layer among dense ones."""
    model, quantised = tiny_llama().eval(), opaque_model()
    model.model.layers[1].self_attn.v_proj = quantised.model.layers[1].self_attn.v_proj
    return model


def engine_on(model: nn.Module) -> en.LocalEngine:
    policy = en.Policy.of(model, word_tokenizer(64))
    adapter = attach(policy, LoRA(4), targets=["q_proj", "v_proj"])
    perturb(adapter, std=0.3)
    return en.LocalEngine(policy, adapter)


TORCHAO = pytest.param(torchao_model, marks=pytest.mark.integration)


@pytest.mark.parametrize("make", [opaque_model, TORCHAO, mixed_model], ids=["opaque", "torchao-int8", "mixed"])
def test_a_quantised_base_is_sampled_unmerged(make: Callable[[], nn.Module], merges: list[Adapter]) -> None:
    """The samples are those of the adapted policy: their log-probs equal those of scoring, not the base's."""
    engine = engine_on(make())
    assert not engine.adapter.mergeable
    rollouts = engine.sample(PROMPTS, 40, SPEC)
    assert not merges and len(rollouts) == 80
    batch = en.Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts])
    behaviour = torch.tensor([lp for r in rollouts for lp in r.logprobs])
    live, base = (engine.score(batch, LogProbsWanted(), who) for who in ("live", "base"))
    torch.testing.assert_close(behaviour, live, rtol=0, atol=1e-4)
    assert not torch.allclose(behaviour, base, atol=0.1)


def test_a_16_bit_base_is_sampled_unmerged(merges: list[Adapter]) -> None:
    """A merged weight would be rounded to 16 bits, and the samples would be those of another policy."""
    engine = engine_on(tiny_llama().to(torch.bfloat16))
    assert engine.adapter.mergeable and engine.adapter.merging_pays(40)
    engine.sample(PROMPTS, 40, SPEC)
    assert not merges


def test_a_dense_base_is_merged_when_that_is_faster(merges: list[Adapter]) -> None:
    """q_proj 32 × 32 and v_proj 16 × 32, twice: Σ m·n = 3072, Σ (m + n) = 224, so from 13.7 tokens on."""
    engine = engine_on(tiny_llama())
    assert [engine.adapter.merging_pays(n) for n in (13, 14)] == [False, True]
    square = attach(tiny_llama(), get_variant("lora", rank=2), targets=["q_proj"])
    assert [square.merging_pays(n) for n in (15, 16)] == [False, True], "at equal work, too: 1024 / 64"
    engine.sample(PROMPTS[:1], 1, SPEC)
    assert not merges, "8 tokens"
    engine.sample(PROMPTS, 1, SPEC)
    assert merges == [engine.adapter], "16 tokens"


@pytest.mark.parametrize("label", SUBJECTS)
def test_an_engine_without_an_optimizer_learns_at_the_variants_rate(label: str) -> None:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    policy = en.Policy.of(tiny_llama(), word_tokenizer(64))
    ids = torch.arange(12)[None]
    adapter = attach(policy, variant, calibration=[ids] if variant.wants_calibration() else None)
    assert en.LocalEngine(policy, adapter).learning_rate == variant.lr
    assert variant.lr_source, "with where it comes from"


def test_the_command_prints_every_rate_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "600")
    with pytest.raises(SystemExit) as left:
        cli.main(["adapters"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for row in list_variants():
        assert f"{row['lr']:g} ({row['lr_source']})" in out


def test_default_rates_differ_and_a_given_rate_is_used() -> None:
    rates = {row["name"]: row["lr"] for row in list_variants()}
    assert rates["ia3"] == 5e-3 and rates["lora"] == 1e-4
    policy = en.Policy.of(tiny_llama(), word_tokenizer(64))
    assert en.LocalEngine(policy, attach(policy, IA3()), en.AdamW(lr=0.5)).learning_rate == 0.5

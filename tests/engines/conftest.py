"""A tiny random Llama in float64 with a perturbed LoRA, so that equalities can be asked for to 1e-12."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import earnest as en
from earnest.engines import AdamW, LocalEngine
from earnest.engines.optimizers import Optimizer
from earnest.models.policy import Policy
from earnest.signals import Batch
from tests.engines.words import word_tokenizer

VOCABULARY = 131


def tiny_policy(dtype: torch.dtype = torch.float64, seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    with torch.no_grad():  # a random head at scale 1, so that distributions are far from uniform
        model.lm_head.weight.mul_(20)
    return Policy.of(model, word_tokenizer(VOCABULARY), name="tiny")


def perturb(adapter: en.Adapter, seed: int = 1, size: float = 0.2) -> None:
    """Add noise to every parameter, which is symmetric at initialization."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * size)


@pytest.fixture
def make_engine() -> Callable[..., LocalEngine]:
    def make(
        *,
        dtype: torch.dtype = torch.float64,
        perturbed: bool = True,
        lr: float = 1e-2,
        optimizer: Optimizer | None = None,
        **settings: object,
    ) -> LocalEngine:
        policy = tiny_policy(dtype)
        adapter = en.attach(policy, en.LoRA(rank=3), targets=("q_proj", "v_proj"), seed=0)
        if perturbed:
            perturb(adapter)
        return LocalEngine(policy, adapter, optimizer or AdamW(lr=lr), **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def batch() -> Batch:
    """Five ragged rows in two groups, off-policy, with uneven lengths on purpose."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(4, 6), (4, 1), (7, 3), (2, 9), (7, 5)]
    prompts = [torch.randint(3, VOCABULARY, (p,), generator=generator).tolist() for p, _ in sizes]
    completions = [torch.randint(3, VOCABULARY, (c,), generator=generator).tolist() for _, c in sizes]
    behaviour = [(-3 + torch.rand(c, generator=generator)).tolist() for _, c in sizes]
    return Batch.from_rows(
        prompts,
        completions,
        group=[0, 0, 1, 1, 1],
        advantages=[1.0, -1.0, 0.4, 0.9, -1.3],
        behaviour=behaviour,
        policy_version=[0] * 5,
    )

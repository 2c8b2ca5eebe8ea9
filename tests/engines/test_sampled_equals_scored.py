"""Sampled and scored log-probs are the same numbers, also in 16 bits and at large logits.

The sampler once rounded logits to bf16 before the softmax while the trainer computed them in float32. At logits of 30
the two differed by up to 0.09 nats, and GSPO, whose clip range is ±4e-4, clipped half of its on-policy tokens.
"""

from __future__ import annotations

import pytest
import torch

import earnest as en
from earnest.engines import HiddenWanted, LogProbsWanted
from earnest.models import Policy, SampleSpec
from earnest.signals import Hidden
from tests.models import tiny

ROOM = {torch.bfloat16: 1e-3, torch.float16: 2e-3, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", ROOM, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_ratios_are_1_at_large_logits(dtype: torch.dtype, temperature: float) -> None:
    policy = en.load("nano", dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    with torch.no_grad():
        policy.head.weight.mul_(3)
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=4)))
    task = en.get_task("sort")
    batch = en.collect(engine, task, task.prompts("train", 4, seed=0), 8, SampleSpec(temperature=temperature)).batch
    scored = engine.score(batch, LogProbsWanted(temperature))
    hidden = engine.score(batch, HiddenWanted())
    assert isinstance(scored, torch.Tensor) and isinstance(hidden, Hidden) and batch.behaviour is not None
    assert float(policy.head.logits(hidden.states).max()) > 25
    ratio = (scored - batch.behaviour).exp()
    assert float((ratio - 1).abs().max()) < ROOM[dtype]
    metrics = engine.step(batch, en.GSPO()).terms["gspo"].metrics
    if dtype is not torch.float16:  # its products are rounded differently for one row and for many
        assert metrics["clip_low"] == metrics["clip_high"] == 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi_bias"])
def test_the_head_computes_logits_in_float32(kind: str) -> None:
    """Against the float64 product of the same 16-bit weights; rounding to bf16 would be off by up to 0.06 here."""
    policy = Policy.of(tiny.model(kind).to(torch.bfloat16), tiny.tokenizer())
    head, hidden = policy.head, torch.randn(5, policy.head.weight.shape[1]).bfloat16() * 4
    raw = hidden.double() @ head.weight.double().t()
    want = head.shape(raw if head.bias is None else raw + head.bias.double())
    assert head.logits(hidden).dtype == torch.float32
    assert float(want.abs().max()) > 4
    torch.testing.assert_close(head.logits(hidden).double(), want, rtol=1e-5, atol=1e-5)

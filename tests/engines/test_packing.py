"""Packed rows give the scalars and the gradient of padded ones, for every term, and compute each prompt once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

import earnest as en
from earnest.engines import AdamW, LocalEngine
from earnest.engines.packing import Packer, packer_of
from earnest.models.policy import Policy
from earnest.objectives import BNPO, GRPO
from earnest.objectives.base import Objective
from earnest.objectives.needs import LogProb
from earnest.signals import Batch
from tests.engines.cases import every_signal
from tests.engines.conftest import VOCABULARY, perturb, tiny_policy
from tests.engines.test_local import RootMeanSquare, close
from tests.engines.words import word_tokenizer
from tests.objectives.support import examples

Make = Callable[..., LocalEngine]
TERMS = examples()


def packing(engine: LocalEngine, balance: float = 10.0**6) -> LocalEngine:
    """The engine, for which attention is so cheap that everything is packed and shared."""
    packer = engine.layouts.packing
    assert isinstance(packer, Packer), packer
    packer.balance = balance
    return engine


@pytest.fixture(scope="module")
def both() -> tuple[LocalEngine, LocalEngine, Batch]:
    """An engine that packs, one that pads, and a batch with every signal."""
    made = []
    for pack in (True, False):
        policy = tiny_policy()
        adapter = en.attach(policy, en.LoRA(rank=3), targets=("q_proj", "v_proj"), seed=0)
        perturb(adapter)
        made.append(LocalEngine(policy, adapter, AdamW(lr=1e-2), pack=pack))
    return packing(made[0]), made[1], every_signal(made[1])


@pytest.mark.parametrize("kind", sorted(TERMS))
def test_every_term_has_the_same_gradient_packed_and_padded(
    both: tuple[LocalEngine, LocalEngine, Batch], kind: str
) -> None:
    packed, padded, batch = both
    close(padded.gradients(batch, TERMS[kind]), packed.gradients(batch, TERMS[kind]), 1e-6)


@given(data=st.data())
@settings(max_examples=25)
def test_ragged_batches_with_any_common_beginnings(
    both: tuple[LocalEngine, LocalEngine, Batch], data: st.DataObject
) -> None:
    packed, padded, _ = both
    token = st.integers(3, 6)  # few ids, so that rows often begin alike
    row = st.tuples(st.lists(token, min_size=1, max_size=9), st.lists(token, min_size=1, max_size=9))
    rows = data.draw(st.lists(row, min_size=1, max_size=9))
    batch = Batch.from_rows([p for p, _ in rows], [c for _, c in rows])
    packing(packed, data.draw(st.sampled_from([3.0, 30.0, 1e6])))
    packed.micro_tokens = data.draw(st.sampled_from([1, 12, 40, 10**4]))
    need = LogProb()
    got, want = (e.scalars(batch, [need])[need].values for e in (packed, padded))
    assert float((got - want).abs().max()) <= 1e-10
    packed.micro_tokens = 8192
    packing(packed)


def test_a_completion_does_not_attend_to_another_one(both: tuple[LocalEngine, LocalEngine, Batch]) -> None:
    packed, _, batch = both
    inputs = batch.inputs.clone()
    inputs[0, 3:6] = (inputs[0, 3:6] + 1) % VOCABULARY  # the first completion of the first prompt
    other = batch.with_signals(inputs=inputs)
    states = [packed._hidden(packed._cut(b)[0]).detach() for b in (batch, other)]
    changed = (states[0] - states[1]).abs().amax(1) > 1e-12
    assert bool(changed[batch.row == 0].any())
    assert not bool(changed[batch.row != 0].any())


def test_the_report_counts_what_was_computed(make_engine: Make) -> None:
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY, (10,), generator=g).tolist() for _ in range(4)]
    sizes = torch.randint(1, 9, (32,), generator=g).tolist()
    completions = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in sizes]
    repeated = [p for p in prompts for _ in range(8)]
    batch = Batch.from_rows(repeated, completions, advantages=[1.0, -1.0] * 16, behaviour=[[-4.0] * n for n in sizes])
    packed = packing(make_engine(pack=True)).step(batch, GRPO())
    padded = make_engine(pack=False).step(batch, GRPO())
    assert (packed.layout, padded.layout) == ("packed (masked sdpa)", "padded (pack is false)")
    assert padded.computed_tokens == batch.inputs.numel() and padded.padded_tokens > 100
    assert packed.computed_tokens - packed.padded_tokens <= 4 * 10 + sum(sizes)  # each prompt once
    assert packed.padded_tokens <= 0.1 * packed.computed_tokens
    assert packed.loss == pytest.approx(padded.loss, rel=1e-9)
    assert packed.update.gradient_norm == pytest.approx(padded.update.gradient_norm, rel=1e-5)


def test_by_default_rows_are_packed_where_that_is_cheaper(make_engine: Make, batch: Batch) -> None:
    engine = packing(make_engine())
    alike = Batch.from_rows([[i + 3, 4] for i in range(4)], [[5, 6]] * 4)
    assert engine._cut(alike)[0].layout is None  # nothing to gain
    shared = Batch.from_rows([[3, 4, 5, 6, 7, 8, 9]] * 4, [[i, 6] for i in range(4)])
    assert engine._cut(shared)[0].layout is not None
    late = Batch.from_rows([[3, 4]] * 4, [[i] * 9 for i in range(4)])
    packing(engine, 1.0)  # attention is all that costs
    assert engine._cut(late)[0].layout is None


@pytest.mark.parametrize("objective", [BNPO(), GRPO(clip=0.2) + 0.3 * RootMeanSquare()], ids=["bnpo", "two passes"])
def test_terms_that_depend_on_the_cut_or_on_the_whole_batch(make_engine: Make, batch: Batch, objective: Any) -> None:
    objective = Objective.of(objective)
    packed, padded = packing(make_engine(pack=True, micro_tokens=24)), make_engine(pack=False, micro_tokens=24)
    assert len(padded._cut(batch)) > 1
    close(padded.gradients(batch, objective), packed.gradients(batch, objective))


def windowed(window: int | None) -> Policy:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, sliding_window=window,
    )  # fmt: skip
    return Policy.of(MistralForCausalLM(config), word_tokenizer(64), name="mistral")


def test_a_model_with_other_attention_is_padded_and_the_report_has_the_reason(make_engine: Make, batch: Batch) -> None:
    assert isinstance(packer_of(windowed(None)), Packer)
    policy = windowed(4)
    engine = LocalEngine(policy, en.attach(policy, en.LoRA(rank=2)), pack=True)
    rows = Batch.from_rows([[3, 4, 5]] * 2, [[6], [7]], role="demonstration")
    report = engine.step(rows, en.SFT())
    assert report.layout == "padded (MistralForCausalLM attends to a window of 4 tokens)"


def test_a_model_that_ignores_the_mask_is_found_by_the_test_on_it(make_engine: Make) -> None:
    policy = tiny_policy()
    plain = policy.hidden
    policy.hidden = lambda ids, **_: plain(ids)  # type: ignore[method-assign]
    assert packer_of(policy) == "LlamaForCausalLM computes packed rows differently from padded ones"


def test_16_bits_on_a_cpu_are_padded_unless_asked_for(make_engine: Make) -> None:
    assert isinstance(make_engine(dtype=torch.bfloat16).layouts.packing, str)
    assert isinstance(make_engine(dtype=torch.bfloat16, pack=True).layouts.packing, Packer)

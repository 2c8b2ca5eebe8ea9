"""Every kind of cache gives the uncached hidden states; an architecture gets only a kind that works with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from earnest.errors import SamplingError
from earnest.models import SampleSpec, sample
from earnest.models.cache import BufferLayer, start
from tests.models import tiny

KINDS = dict.fromkeys(tiny.CONFIGS, "buffered") | {"mamba": "none", "lfm2": "dynamic"}


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_every_kind_equals_sampling_without_a_cache(kind: str) -> None:
    """Ragged prompts, rows that repeat, end early and are dropped; windows of 4 are crossed many times."""
    policy = tiny.policy(kind)
    policy.model.generation_config.eos_token_id = [1, 10, 20, 30]
    assert policy.cache_kind == KINDS[kind]
    prompts, spec = [[5, 6, 7, 8, 9, 10, 11], [7], [8, 9]], SampleSpec(max_new_tokens=14, seed=3)
    slow = sample(policy, prompts, 3, spec, cache="none")
    assert len({len(c.tokens) for c in slow}) > 1  # some ended, so rows were dropped
    for fast in {"buffered": ("buffered", "dynamic"), "dynamic": ("dynamic",), "none": ()}[policy.cache_kind]:
        for a, b in zip(slow, sample(policy, prompts, 3, spec, cache=fast), strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_cache_kind_that_fails_for_the_architecture_is_refused() -> None:
    with pytest.raises(SamplingError, match="cache is 'buffered'; tiny lfm2 works with dynamic, none"):
        sample(tiny.policy("lfm2"), [[5]], 1, SampleSpec(), cache="buffered")


def test_a_cache_with_wrong_states_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test on the model decides: a buffer that loses its values is detected, and the next kind is used."""
    update = BufferLayer.update

    def lossy(self: BufferLayer, k: torch.Tensor, v: torch.Tensor, *args: object, **kw: object) -> object:
        keys, values = update(self, k, v)
        return keys, values.clone().index_fill_(2, torch.tensor([0]), 0.0)

    monkeypatch.setattr(BufferLayer, "update", lossy)
    assert tiny.policy("llama").cache_kind == "dynamic"


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), room=st.integers(1, 9), seed=st.integers(0, 99))
def test_buffer_is_concatenation(sizes: list[int], room: int, seed: int) -> None:
    """For any initial size, and with rows selected or repeated, it returns the same as torch.cat."""
    g = torch.Generator().manual_seed(seed)
    layer = BufferLayer(room)
    keys = values = torch.empty(3, 2, 0, 4)
    for size in sizes:
        k, v = torch.randn(len(keys), 2, size, 4, generator=g), torch.randn(len(keys), 2, size, 4, generator=g)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        assert layer.get_mask_sizes(size) == (keys.shape[2], 0)
        got_k, got_v = layer.update(k, v)
        assert torch.equal(got_k, keys)
        assert torch.equal(got_v, values)
        assert layer.get_seq_length() == keys.shape[2]
        rows = torch.randint(0, len(keys), (int(torch.randint(1, 5, (), generator=g)),), generator=g)
        layer.reorder_cache(rows)
        keys, values = keys[rows], values[rows]


def test_a_shared_prompt_is_computed_once() -> None:
    policy = tiny.policy()
    assert policy.cache_kind == "buffered" and policy.decoder is not None
    shapes, _ = tiny.read(policy)
    policy.model.generation_config.eos_token_id = None
    policy.__dict__["eos_ids"] = frozenset()
    sample(policy, [[5, 6, 7], [8, 9, 10], [5, 6, 7]], 4, SampleSpec(max_new_tokens=3))
    assert shapes == [(2, 3), (12, 1), (12, 1)]  # two distinct prompts; the last token is never fed


def test_start_repeats_and_orders_rows() -> None:
    policy = tiny.policy()
    with torch.no_grad():
        rows = start(policy, "buffered", [[5, 6], [7, 8, 9]], torch.tensor([1, 0, 1]), 4)
        a, b = policy.hidden(torch.tensor([[5, 6]]))[0, -1], policy.hidden(torch.tensor([[7, 8, 9]]))[0, -1]
        assert torch.allclose(rows.last, torch.stack([b, a, b]), atol=1e-5)
        rows.keep(torch.tensor([1]))
        rows.step(torch.tensor([11]))
        assert torch.allclose(rows.last, policy.hidden(torch.tensor([[5, 6, 11]]))[:, -1], atol=1e-5)

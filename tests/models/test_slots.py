"""Laws of continuous batching: when a row joins, and with which rows, does not matter; ended rows leave their slots."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.models import Completion, Policy, SampleSpec, sample
from earnest.models.sampling import SampleRow, evaluating
from earnest.models.slots import SlotSampler
from tests.models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 10], [7], [8, 9, 30], [11, 12, 13, 14], [8, 9, 30, 4, 4, 4, 9, 20, 21, 22]]
SPEC = SampleSpec(max_new_tokens=24, seed=7)


@lru_cache
def shared(kind: str) -> Policy:
    policy = tiny.policy(kind)
    policy.model.generation_config.eos_token_id = [1, 10, 20]
    return policy


@lru_cache
def expected(kind: str) -> dict[tuple[int, int], Completion]:
    """Every completion alone in its batch."""
    return {(i, j): c for i, p in enumerate(PROMPTS) for j, c in enumerate(sample(shared(kind), [p], 3, SPEC))}


def run(policy: Policy, joins: list[int], max_rows: int) -> dict[tuple[int, int], Completion]:
    """Submit row k before step ``joins[k]``, and step until all rows have ended."""
    rows = [SampleRow(i, j, tuple(p), j) for i, p in enumerate(PROMPTS) for j in range(3)]
    done: dict[tuple[int, int], Completion] = {}
    with evaluating(policy):
        slots = SlotSampler(policy, SPEC, max_rows=max_rows)
        for step in range(1000):
            slots.submit([row for row, join in zip(rows, joins, strict=True) if join == step])
            for row, completion in slots.step():
                done[row.prompt_index, row.sample_index] = completion
            assert max((len(g.rows) for g in slots._groups), default=0) <= max(max_rows, 1)
            if step >= max(joins) and not len(slots):
                break
    return done


@pytest.mark.parametrize("kind", ["llama", "gemma2", "lfm2"])
@settings(max_examples=3)
@given(joins=st.lists(st.integers(0, 40), min_size=15, max_size=15), max_rows=st.sampled_from([1, 2, 5, 64]))
def test_the_time_of_joining_changes_nothing(kind: str, joins: list[int], max_rows: int) -> None:
    """Windows of gemma2 are crossed; a long prompt that joins late needs more columns than the batch has."""
    found, want = run(shared(kind), joins, max_rows), expected(kind)
    assert found.keys() == want.keys()
    for key, completion in want.items():
        assert (found[key].tokens, found[key].finish) == (completion.tokens, completion.finish)
        assert found[key].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def test_a_free_slot_is_used_at_once_and_a_shared_prompt_is_computed_once() -> None:
    policy = shared("llama")
    assert policy.cache_kind == "buffered" and policy.decoder is not None
    shapes, unhook = tiny.read(policy)
    short = SampleSpec(max_new_tokens=3, stop_ids=())
    with evaluating(policy):
        slots = SlotSampler(policy, short, max_rows=2)
        slots.submit([SampleRow(0, j, (5, 6, 7), j, limit) for j, limit in enumerate([1, 3, 3, 3])])
        ended = [[row.sample_index for row, _ in slots.step()] for _ in range(5)]
    unhook()
    assert ended == [[0], [], [1], [2], []]
    # Rows 0 and 1 share a prompt. Row 0 ends with its first token, row 2 takes its slot before the second one.
    assert shapes[:3] == [(1, 3), (2, 1), (1, 3)]


def test_the_limit_of_a_row_cuts_it_off() -> None:
    policy = shared("llama")
    whole = expected("llama")
    with evaluating(policy):
        slots = SlotSampler(policy, SPEC)
        slots.submit([SampleRow(i, 0, tuple(p), 0, limit=i + 1) for i, p in enumerate(PROMPTS)])
        found = {}
        while len(slots):
            found.update({row.prompt_index: c for row, c in slots.step()})
    for i, completion in found.items():
        full = whole[i, 0].tokens
        assert completion.tokens == full[: i + 1]
        assert completion.finish == ("stop" if len(full) <= i + 1 and whole[i, 0].finish == "stop" else "length")
    assert slots.tokens == sum(len(c.tokens) for c in found.values())


def test_padding_that_no_row_needs_is_cut_off() -> None:
    """A stream of rows keeps the cache as wide as its longest row, not as long as the stream."""
    policy, widths = shared("llama"), []
    spec = SampleSpec(max_new_tokens=8, stop_ids=())
    found: list[dict[int, tuple[int, ...]]] = []
    for most in (1, 3):
        with evaluating(policy):
            slots = SlotSampler(policy, spec, max_rows=most)
            slots.submit([SampleRow(0, j, (5, 6, 7), j, 3 + j % 6) for j in range(60)])
            found.append({})
            widths.clear()
            while len(slots):
                found[-1].update({row.sample_index: completion.tokens for row, completion in slots.step()})
                widths += [g.sequences.used for g in slots._groups]  # type: ignore[attr-defined]
    assert max(widths) <= 11 + 32 + 32
    assert len(widths) > 100
    assert found[0] == found[1] and len(found[0]) == 60, "each is what it would be alone"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_the_next_turn_computes_only_what_is_new(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the same conversation continues from the keys and values of its last turn; windows cannot."""
    policy, computed = shared(kind), []
    hidden = type(policy).hidden
    monkeypatch.setattr(
        type(policy), "hidden", lambda self, ids, **kw: (computed.append(ids.shape[1]), hidden(self, ids, **kw))[1]
    )

    def talk(resume: bool) -> list[list[Completion]]:
        prompts = {i: tuple(p) for i, p in enumerate(PROMPTS)}
        turns: list[list[Completion]] = []
        with evaluating(policy):
            slots = SlotSampler(policy, SPEC, max_rows=3, resume=resume)
            for _ in range(3):
                slots.submit([SampleRow(i, 0, prompt, 0) for i, prompt in prompts.items()])
                found = {}
                while len(found) < len(prompts):
                    found.update({row.prompt_index: c for row, c in slots.step()})
                turns.append([found[i] for i in prompts])
                prompts = {i: (*p, *found[i].tokens, *range(5, 7 + i)) for i, p in prompts.items()}
            slots.forget(0, 0)
        return turns

    computed.clear()
    again, first = talk(resume=False), max(computed)
    computed.clear()
    resumed, longest = talk(resume=True), max(computed)
    for a, b in zip(again, resumed, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.tokens, x.finish) == (y.tokens, y.finish)
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)
    assert longest == first if kind == "gemma2" else longest <= 12 < first


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("rests", [[1, 1, 1], [1, 3, 2], [0, 2, 1]], ids=["equal", "ragged", "a prompt begins another"])
def test_what_all_prompts_begin_with_is_computed_once(
    kind: str, rests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completions are those of each prompt alone, also where the common beginning is all of one prompt; windows
    cannot begin with keys and values that are there."""
    policy, computed = shared(kind), []
    hidden = type(policy).hidden
    common = [5 + (7 * i) % 20 for i in range(34)]
    prompts = [[*common, *range(30 + 3 * i, 30 + 3 * i + rest)] for i, rest in enumerate(rests)]
    alone = [replace(c, prompt_index=i) for i, p in enumerate(prompts) for c in sample(policy, [p], 2, SPEC)]
    monkeypatch.setattr(
        type(policy), "hidden", lambda self, ids, **kw: (computed.append(ids.shape), hidden(self, ids, **kw))[1]
    )
    found = sample(policy, prompts, 2, SPEC)
    for x, y in zip(found, alone, strict=True):
        assert (x.prompt_index, x.tokens, x.finish) == (y.prompt_index, y.tokens, y.finish)
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)
    length, longest = min(34, min(map(len, prompts)) - 1), max(map(len, prompts))
    want = [(3, longest)] if kind == "gemma2" else [(1, length), (3, longest - length)]
    assert [tuple(shape) for shape in computed if shape[1] > 1] == [shape for shape in want if shape[1] > 1]


def test_gradients_and_modes_come_back() -> None:
    policy = tiny.policy("llama")
    policy.model.train()
    with evaluating(policy):
        assert not torch.is_grad_enabled()
        assert not policy.model.training
    assert policy.model.training
    assert torch.is_grad_enabled()


def test_ended_rows_are_dropped_once_a_quarter_has_ended() -> None:
    """Dropping copies the cache, so a single row of many is not dropped."""
    policy, sizes = shared("llama"), []
    with evaluating(policy):
        slots = SlotSampler(policy, SampleSpec(max_new_tokens=6, stop_ids=()))
        slots.submit([SampleRow(0, j, (5, 6, 7), j, limit=1 + (j > 0) + 3 * (j > 1)) for j in range(8)])
        while len(slots):
            slots.step()
            sizes += [len(group.rows) for group in slots._groups]
    assert sizes == [8, 6, 6, 6], "not after the first of eight, but after the second"

"""The stream: the same for any portions, resumable from its position, without held-out prompts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.tasks import PromptStream, TaskError, get_task
from earnest.tasks.split import _block_seed


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(-1000, 1000), portions=st.lists(st.integers(0, 90), min_size=1, max_size=8), cut=st.integers(0, 7)
)
def test_portions_and_resuming_change_nothing(seed: int, portions: list[int], cut: int) -> None:
    task = get_task("sort")
    whole = PromptStream(task, seed).next(sum(portions))
    stream = PromptStream(task, seed)
    parts = []
    for i, count in enumerate(portions):
        if i == cut:
            stream = PromptStream(task, seed, position=stream.position)
        parts += stream.next(count)
    assert parts == whole


def test_the_stream_crosses_blocks_with_new_prompts() -> None:
    prompts = PromptStream(get_task("sort"), 0).next(600)
    assert len({p.id for p in prompts[:256]}) == 256
    assert prompts[:256] != prompts[256:512]


def test_train_and_heldout_streams_share_nothing() -> None:
    train = {p.id for p in PromptStream(get_task("add"), 0).next(1000)}
    heldout = {p.id for p in PromptStream(get_task("add"), 0, "heldout").next(500)}
    assert not train & heldout


@given(
    a=st.tuples(st.integers(-500, 500), st.integers(0, 500)), b=st.tuples(st.integers(-500, 500), st.integers(0, 500))
)
def test_no_two_seeds_share_a_block(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (_block_seed(*a) == _block_seed(*b)) == (a == b)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(TaskError, match="count=-1"):
        PromptStream(get_task("sort"), 0).next(-1)

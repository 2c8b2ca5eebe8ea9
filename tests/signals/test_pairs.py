"""Preference pairs from rollouts, and roles that were looked for and not found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.errors import ObjectiveError, SignalError
from earnest.objectives import GRPO, SFT, Objective, Reinforce, SimPO
from earnest.signals import Batch, pairs_of


def test_by_hand() -> None:
    """Group 0 has rewards 1, 0, 0.5: the best over the worst. Group 1 has a tie: no pair."""
    assert pairs_of([1.0, 0.0, 0.5, 0.3, 0.3], [0, 0, 0, 1, 1]) == [(0, 1)]
    assert pairs_of([0.0, 1.0, 0.2, 0.9], [0, 0, 0, 0], at_most=2) == [(1, 0), (3, 2)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12), st.integers(1, 3))
def test_laws(rows: list[tuple[int, int]], at_most: int) -> None:
    rewards, group = [float(r) for r, _ in rows], [g for _, g in rows]
    pairs = pairs_of(rewards, group, at_most)
    used = [i for pair in pairs for i in pair]
    assert len(used) == len(set(used)), "each rollout in one pair at most"
    for better, worse in pairs:
        assert group[better] == group[worse] and rewards[better] > rewards[worse]
    for g in set(group):
        own = [r for r, h in zip(rewards, group, strict=True) if h == g]
        count = sum(group[a] == g for a, _ in pairs)
        assert count <= at_most and (count > 0) == (len(set(own)) > 1)


def test_a_sought_role_without_rows_is_idle_and_an_unsought_one_is_an_error() -> None:
    batch = Batch.from_rows([[1]] * 2, [[2], [3]], advantages=[1.0, -1.0], behaviour=[[-1.0], [-1.0]])
    with pytest.raises(SignalError, match="simpo: needs rows with role"):
        (GRPO() + SimPO()).check(batch)
    sought = batch.with_signals(sought=("chosen", "rejected", "rollout"))
    (GRPO() + SimPO()).check(sought)
    assert (GRPO() + SimPO()).idle(sought) == {"simpo": "no chosen or rejected row was found for this batch"}
    with pytest.raises(ObjectiveError, match="no chosen or rejected row was found"):
        Objective.of(SimPO()).check(sought)
    with pytest.raises(SignalError, match="sft: needs rows with role demonstration"):
        (GRPO() + SFT()).check(sought)
    assert Objective.of(Reinforce()).idle(sought) == {}

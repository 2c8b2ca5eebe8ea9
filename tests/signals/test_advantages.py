"""Advantages: by hand, by the laws of each estimator, and for groups with equal rewards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from earnest.errors import SignalError
from earnest.signals import Batch, advantages, with_advantages
from earnest.signals.advantages import ESTIMATORS


def found(rewards: list[float], group: list[int], estimator: str = "group") -> list[float]:
    return advantages(torch.tensor(rewards), torch.tensor(group), estimator).values.tolist()  # type: ignore[arg-type]


def test_by_hand() -> None:
    """Group 0: rewards 1, 2, 3 (mean 2, std 1). Group 1: 0, 4 (mean 2, std 2√2). Batch std of 1,2,3,0,4: √2.5."""
    rewards, group = [1.0, 2.0, 3.0, 0.0, 4.0], [0, 0, 0, 1, 1]
    half = 0.5**0.5
    assert found(rewards, group, "group") == pytest.approx([-1, 0, 1, -half, half])
    assert found(rewards, group, "none") == pytest.approx([-1, 0, 1, -2, 2])
    assert found(rewards, group, "leave_one_out") == pytest.approx([-1.5, 0, 1.5, -4, 4])
    assert found(rewards, group, "batch") == pytest.approx([x / 2.5**0.5 for x in (-1, 0, 1, -2, 2)])
    # Groups of different means: the scale is the std of the rewards themselves (√5.3), not of the centred ones.
    uneven = found([1.0, 2.0, 3.0, 0.0, 6.0], group, "batch")
    assert uneven == pytest.approx([x / 5.3**0.5 for x in (-1, 0, 1, -3, 3)])


groups = st.lists(st.lists(st.integers(0, 20).map(lambda x: x / 4), min_size=2, max_size=5), min_size=1, max_size=4)


def _flat(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    group = [g for g, row in enumerate(rows) for _ in row]
    return torch.tensor([r for row in rows for r in row]), torch.tensor(group)


@given(groups, st.integers(-10, 10), st.integers(1, 8))
def test_shift_scale_zero_sum_and_locality(rows: list[list[float]], shift: int, scale: int) -> None:
    """A constant added to one prompt's rewards changes nothing (a real bug normalised across prompts).

    Scale: group and batch are free of it, none and leave-one-out follow it. Each group sums to 0.
    """
    rewards, group = _flat(rows)
    for estimator in ESTIMATORS:
        base = advantages(rewards, group, estimator).values
        sums = torch.zeros(len(rows)).index_add(0, group, base)
        torch.testing.assert_close(sums, torch.zeros(len(rows)), atol=1e-4, rtol=0)
        factor = 1 if estimator in ("group", "batch") else scale
        torch.testing.assert_close(
            advantages(rewards * scale, group, estimator).values, base * factor, atol=1e-4, rtol=1e-4
        )
        if estimator != "batch":
            moved = torch.where(group == 0, rewards + shift, rewards)
            torch.testing.assert_close(advantages(moved, group, estimator).values, base, atol=1e-4, rtol=1e-4)
            other = torch.where(group == 0, rewards * 3 + 1, rewards)
            kept = group != 0
            torch.testing.assert_close(advantages(other, group, estimator).values[kept], base[kept])
        else:
            torch.testing.assert_close(advantages(rewards + shift, group, estimator).values, base, atol=1e-4, rtol=1e-4)


@given(groups)
def test_group_mode_has_unit_spread_and_counts_flat_groups(rows: list[list[float]]) -> None:
    made = advantages(*_flat(rows), "group")
    flat = [len(set(row)) == 1 for row in rows]
    assert (made.groups, made.zero_variance) == (len(rows), sum(flat))
    _, group = _flat(rows)
    for g, is_flat in enumerate(flat):
        own = made.values[group == g]
        assert not own.any() if is_flat else float(own.std()) == pytest.approx(1.0, abs=1e-4)


@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[list[float]], random: object) -> None:
    """Prompts repeated as [p1, p2]·n but grouped as consecutive was a real bug: groups are identified by id, not by
    position."""
    rewards, group = _flat(rows)
    assume(len(rewards) > 2)
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for estimator in ESTIMATORS:
        there = advantages(rewards[order], group[order], estimator).values
        torch.testing.assert_close(there, advantages(rewards, group, estimator).values[order])


def test_rewards_that_differ_by_rounding_only_are_the_same() -> None:
    made = advantages(torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64), torch.tensor([0, 0]))
    assert made.zero_variance == 1 and not made.values.any()


@pytest.mark.parametrize(("rewards", "flat"), [([1e-8, 3e-8], 0), ([1e9, 1e9 + 1], 1)])
def test_rewards_are_the_same_relative_to_their_size(rewards: list[float], flat: int) -> None:
    """Tiny rewards may differ by as much as large ones; large ones are not different because of their last digits."""
    made = advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor([0, 0]))
    assert made.zero_variance == flat and bool(made.values.any()) is not bool(flat)


@pytest.mark.parametrize(
    ("rewards", "group", "estimator", "words"),
    [
        ([1.0, 2.0, 3.0], [0, 0, 1], "group", "group 1 has one completion"),
        ([1.0, 2.0, 3.0], [0, 0, 1], "none", "would always be 0"),
        ([1.0, float("nan")], [0, 0], "group", "not finite"),
        ([1.0, 2.0], [0, 0], "grouped", "did you mean 'group'"),
    ],
)
def test_refusals(rewards: list[float], group: list[int], estimator: str, words: str) -> None:
    """One sample per prompt with dr_grpo had no effect elsewhere, without an error: every advantage was 0."""
    with pytest.raises(SignalError, match=words):
        found(rewards, group, estimator)


def test_a_batch_gets_advantages_on_its_rollouts_and_names_the_estimator() -> None:
    batch = Batch.from_rows(
        [[1]] * 3, [[2, 3], [2], [4]], role=("rollout", "demonstration", "rollout"), group=[5, 9, 5]
    )
    made = with_advantages(batch, [1.0, 0.0], "none")
    assert made.advantages is not None and made.advantages.tolist() == [0.5, 0.5, 0.0, -0.5]
    assert made.estimator == "none"
    with pytest.raises(SignalError, match="one reward for each of the 2 rollouts"):
        with_advantages(batch, [1.0, 0.0, 1.0])

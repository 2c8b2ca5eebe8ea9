"""Preference pairs from graded rollouts: a better and a worse answer to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence


def pairs_of(rewards: Sequence[float], group: Sequence[int], at_most: int = 1) -> list[tuple[int, int]]:
    """(better, worse) indices of rollouts of one group, largest difference first, each rollout in at most one pair.

    Rollouts of equal reward make no pair.
    """
    members: dict[int, list[int]] = {}
    for i, g in enumerate(group):
        members.setdefault(g, []).append(i)
    found: list[tuple[int, int]] = []
    for own in members.values():
        ranked = sorted(own, key=lambda i: -rewards[i])
        couples = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
        found += [(a, b) for a, b in couples if rewards[a] > rewards[b]][:at_most]
    return found

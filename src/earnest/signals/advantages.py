"""Advantages from rewards, group by group (a group: the completions of one prompt).

    group          A = (r - mean_g) / std_g          scale-free; a group without variance gives 0
    batch          A = (r - mean_g) / std_batch      scale-free over the batch
    none           A =  r - mean_g                   scales with the reward (Dr. GRPO)
    leave_one_out  A =  r_i - mean_{j≠i} r_j         scales with the reward, unbiased baseline (RLOO)

A constant added to all rewards of a group changes nothing, and groups are independent (``batch`` shares only the
scale). The std is the sample std (n-1) without an epsilon: groups with equal rewards are counted and get 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError, nearest
from earnest.signals.batch import Batch

Estimator = Literal["group", "batch", "none", "leave_one_out"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

# Rewards of a group that differ by less than this share of their size count as equal.
SAME_REWARD = 1e-6


@dataclass(frozen=True, eq=False)
class Advantages:
    """One advantage per row, and the number of groups whose rewards do not differ."""

    values: Float[Tensor, " R"]
    estimator: Estimator
    groups: int
    zero_variance: int


def advantages(rewards: Float[Tensor, " R"], group: Int[Tensor, " R"], estimator: Estimator = "group") -> Advantages:
    """An advantage for every row from the rewards of its group."""
    if estimator not in ESTIMATORS:
        raise SignalError(f"unknown advantage estimator {estimator!r}: {nearest(str(estimator), ESTIMATORS)}")
    if rewards.ndim != 1 or rewards.shape != group.shape or rewards.numel() == 0:
        raise SignalError(
            f"need one reward and one group per row, got shapes {tuple(rewards.shape)} and {tuple(group.shape)}."
        )
    rewards = rewards.detach().double()
    if not bool(torch.isfinite(rewards).all()):
        raise SignalError(
            f"{int((~torch.isfinite(rewards)).sum())} rewards are not finite; a grader must return a number."
        )
    ids, place, size = torch.unique(group, return_inverse=True, return_counts=True)
    if bool((size < 2).any()):
        lonely = int(ids[size < 2][0])
        raise SignalError(
            f"group {lonely} has one completion, so its advantage by {estimator!r} would always be 0; "
            "sample at least 2 completions per prompt, or supply advantages of your own."
        )
    count = size.double()
    centred = rewards - _group_sum(rewards, place, len(ids))[place] / count[place]
    spread = (_group_sum(centred**2, place, len(ids)) / (count - 1)).sqrt()
    size_of = torch.zeros(len(ids), dtype=torch.float64, device=rewards.device).scatter_reduce(
        0, place, rewards.abs(), "amax"
    )
    flat = spread <= SAME_REWARD * size_of
    centred = torch.where(flat[place], 0.0, centred)
    if estimator == "group":
        values = centred / torch.where(flat, 1.0, spread)[place]
    elif estimator == "batch":
        whole = rewards.std()
        values = centred / whole if float(whole) > 0 else centred
    elif estimator == "none":
        values = centred
    else:
        values = centred * (count / (count - 1))[place]
    return Advantages(values.float(), estimator, len(ids), int(flat.sum()))


def with_advantages(
    batch: Batch, rewards: Sequence[float] | Float[Tensor, " r"], estimator: Estimator = "group"
) -> Batch:
    """The batch with an advantage for every token of its rollouts, from one reward per rollout.

    Other rows get 0, which no term reads.
    """
    given = torch.as_tensor(rewards, dtype=torch.float64, device=batch.device)
    rollouts = batch.has_role(("rollout",)).nonzero()[:, 0]
    if given.shape != rollouts.shape:
        raise SignalError(f"need one reward for each of the {len(rollouts)} rollouts, got shape {tuple(given.shape)}.")
    unit = torch.full((len(batch),), -1, device=batch.device)
    unit[rollouts] = torch.arange(len(rollouts), device=batch.device)
    return with_credit(batch, given, batch.group[rollouts], unit[batch.row], estimator)


def with_credit(
    batch: Batch,
    returns: Float[Tensor, " U"],
    group: Int[Tensor, " U"],
    unit: Int[Tensor, " N"],
    estimator: Estimator = "group",
) -> Batch:
    """The batch with the advantages of U units of credit (rollouts, conversations, turns), each with a return and the
    group of units that it is compared with. ``unit`` is the unit of every active token; -1: none, advantage 0."""
    values = torch.cat([advantages(returns, group, estimator).values, torch.zeros(1, device=batch.device)])
    return batch.with_signals(advantages=values[unit], estimator=estimator)


def _group_sum(values: Float[Tensor, " R"], place: Int[Tensor, " R"], groups: int) -> Float[Tensor, " G"]:
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add(0, place, values)


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

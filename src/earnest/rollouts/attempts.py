"""Graded rollouts, and numbers about them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from earnest.models import SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Trajectory
from earnest.tasks import Ending, Grade, Prompt


@dataclass(frozen=True)
class Attempt:
    """A rollout or a conversation, the text that the policy wrote, and its grade."""

    prompt: Prompt
    rollout: Rollout | Trajectory
    text: str
    grade: Grade


class Sample(Protocol):
    """Samples ``n`` completions of every prompt (in tokens), prompt by prompt: an engine, or samplers elsewhere."""

    def __call__(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]: ...


def describe(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Metrics besides the reward: lengths, the share of prompts whose completions all have the same reward
    (``groups_without_spread``), and the numbers that graders return."""
    if not attempts:
        return {}
    rewards: dict[int, set[float]] = defaultdict(set)
    for a in attempts:
        rewards[a.rollout.prompt_index].add(a.grade.reward)
    metrics = {
        "correct": _mean([a.grade.correct for a in attempts]),
        "completion_tokens": _mean([len(a.rollout.tokens) for a in attempts]),
        "cut_off": _mean([a.rollout.finish == "length" for a in attempts]),
        "groups_without_spread": _mean([len(r) == 1 for r in rewards.values()]),
        "grader_errors": float(sum("error" in a.grade.extras for a in attempts)),
    }
    metrics |= _conversations([a.rollout for a in attempts if isinstance(a.rollout, Trajectory)])
    extras: dict[str, list[float]] = defaultdict(list)
    for a in attempts:
        for name, value in a.grade.extras.items():
            if isinstance(value, (bool, int, float)):
                extras[name].append(float(value))
    return metrics | {f"grade/{name}": _mean(values) for name, values in sorted(extras.items()) if name not in metrics}


def _conversations(found: Sequence[Trajectory]) -> dict[str, float]:
    """Turns and rows per conversation, tokens that the policy read in it, and the share of each reason of its end."""
    if not found:
        return {}
    seen = [sum(len(s.tokens) for row in t.rows for s in row if s.author != "policy") for t in found]
    return {
        "turns": _mean([len(t.turn_rewards) for t in found]),
        "observed_tokens": _mean(seen),
        "rows_per_conversation": _mean([len(t.rows) for t in found]),
        **{f"ended/{reason}": _mean([t.ending == reason for t in found]) for reason in get_args(Ending)},
    }


def reward_summary(attempts: Sequence[Attempt]) -> dict[str, Any]:
    rewards = [a.grade.reward for a in attempts]
    mean = _mean(rewards)
    return {"mean": mean, "sd": math.sqrt(_mean([(r - mean) ** 2 for r in rewards])), "n": len(rewards)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

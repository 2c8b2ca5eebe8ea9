"""The held-out reward: fixed prompts, fixed sampling seeds, the training temperature, and an honest standard error.

The completions of one prompt are not independent, so the standard error is over the P prompts' means:

    se = sd(m_1 … m_P) / √P,        and for a gain, the same over the differences of each prompt's mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from earnest.errors import ConfigError
from earnest.runs.collect import Attempt, attempt, describe
from earnest.runs.setup import Setup

# Not the run's seed: every seed of a recipe is measured on the same questions with the same random numbers.
HELDOUT_SEED = 20_240


@dataclass(frozen=True)
class Evaluation:
    """One measurement; ``means`` are each prompt's mean reward, in the order of the held-out prompts."""

    step: int
    version: int
    means: tuple[float, ...]
    samples: int
    correct: float
    attempts: tuple[Attempt, ...]
    pairs: Mapping[str, float] = field(default_factory=dict)
    """Held-out preference pairs, where the run has a file of them."""

    @property
    def reward(self) -> float:
        return sum(self.means) / len(self.means)

    @property
    def se(self) -> float | None:
        return standard_error(self.means)

    def record(self, seconds: float) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {
            "kind": "eval",
            "step": self.step,
            "version": self.version,
            "reward": self.reward,
            "se": self.se,
            "prompts": len(self.means),
            "n": len(self.means) * self.samples,
            "correct": self.correct,
            "metrics": describe(self.attempts) | dict(self.pairs),
            "means": list(self.means),
            "seconds": seconds,
        }


def evaluate(setup: Setup, step: int) -> Evaluation:
    """Measure the policy that would be deployed: the live one, without a guard's quarantine."""
    wanted = setup.config.eval
    prompts = setup.task.prompts("heldout", wanted.prompts, HELDOUT_SEED)
    if not prompts:
        raise ConfigError(f"task: {setup.task.name} has no held-out prompts; take another task.")
    with setup.deployed():
        attempts = attempt(setup, prompts, wanted.samples, HELDOUT_SEED)
        pairs = {} if setup.preferences is None else setup.preferences.measure(setup.engine)
    rewards: list[list[float]] = [[] for _ in prompts]
    for a in attempts:
        rewards[a.rollout.prompt_index].append(a.grade.reward)
    means = tuple(sum(r) / len(r) for r in rewards)
    correct = sum(a.grade.correct for a in attempts) / len(attempts)
    return Evaluation(step, setup.engine.version, means, wanted.samples, correct, tuple(attempts), pairs)


def standard_error(values: Sequence[float]) -> float | None:
    """sd/√n with n - 1; None for a single value, which says nothing about its spread."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


def gain(before: Sequence[float], after: Sequence[float]) -> tuple[float, float | None]:
    """(gain, its standard error) with every prompt paired with itself."""
    differences = [a - b for b, a in zip(before, after, strict=True)]
    return sum(differences) / len(differences), standard_error(differences)

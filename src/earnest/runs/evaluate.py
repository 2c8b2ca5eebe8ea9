"""The held-out reward: fixed prompts, fixed sampling seeds, the training temperature, and a standard error.

The completions of one prompt are not independent, so the standard error is that of the P prompts' means:

    se = sd(m_1 … m_P) / √P,        and for a gain, the same over the differences of each prompt's mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from earnest.errors import ConfigError
from earnest.rollouts import Attempt, describe
from earnest.runs.collect import attempt
from earnest.runs.setup import Setup
from earnest.tasks import Prompt

# Not the run's seed: every seed of a recipe is measured on the same questions with the same random numbers.
HELDOUT_SEED = 20_240


@dataclass(frozen=True)
class HeldOutEvaluation:
    """One measurement; ``means`` are each prompt's mean reward, in the order of the held-out prompts."""

    step: int
    version: int
    means: tuple[float, ...]
    samples: int
    correct: float
    attempts: tuple[Attempt, ...]
    pairs: Mapping[str, float] = field(default_factory=dict)
    """Accuracy and margin on the held-out preference pairs, if the run has a file of pairs."""

    @classmethod
    def of(
        cls, attempts: Sequence[Attempt], step: int = 0, version: int = 0, pairs: Mapping[str, float] | None = None
    ) -> HeldOutEvaluation:
        """The measurement from graded completions; every prompt has the same number of them."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for a in attempts:
            rewards[a.rollout.prompt_index].append(a.grade.reward)
        means = tuple(sum(rewards[i]) / len(rewards[i]) for i in sorted(rewards))
        correct = sum(a.grade.correct for a in attempts) / len(attempts)
        return cls(step, version, means, len(attempts) // len(means), correct, tuple(attempts), pairs or {})

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


def heldout(setup: Setup) -> list[Prompt]:
    """The held-out prompts: the same at every evaluation and for every seed."""
    prompts = setup.task.prompts("heldout", setup.config.eval.prompts, HELDOUT_SEED)
    if not prompts:
        raise ConfigError(f"task: {setup.task.name} has no held-out prompts; use another task.")
    return prompts


def evaluate(setup: Setup, step: int) -> HeldOutEvaluation:
    """Measure the policy that would be deployed: the current one, without a guard's quarantine."""
    wanted, prompts = setup.config.eval, heldout(setup)
    with setup.deployed():
        attempts = attempt(setup, prompts, wanted.samples, HELDOUT_SEED)
        pairs = {} if setup.preferences is None else setup.preferences.measure(setup.engine)
    return HeldOutEvaluation.of(attempts, step, setup.engine.version, pairs)


def standard_error(values: Sequence[float]) -> float | None:
    """sd/√n, with the sd's divisor n - 1; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two measurements on the same prompts. Standard errors are None if there is only one prompt."""

    before: float
    after: float
    before_se: float | None
    after_se: float | None
    gain: float
    gain_se: float | None
    prompts: int
    samples: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield f"held-out reward  {_pm(self.before, self.before_se)} → [bold green]{_pm(self.after, self.after_se)}[/]"
        size = f"standard errors over {self.prompts} prompts, {self.samples} completions"
        yield f"gain             {_pm(self.gain, self.gain_se, '+')}  [dim]({size})[/]"


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``Comparison`` from two evaluation lines of metrics.jsonl."""
    gained, gained_se = gain(before["means"], after["means"])
    return {
        "before": before["reward"],
        "after": after["reward"],
        "before_se": before["se"],
        "after_se": after["se"],
        "gain": gained,
        "gain_se": gained_se,
        "prompts": after["prompts"],
        "samples": after["n"],
    }


def _pm(value: float, se: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if se is None else f" ± {se:.3f}")


def gain(before: Sequence[float], after: Sequence[float]) -> tuple[float, float | None]:
    """(gain, its standard error), from the difference of each prompt's means."""
    differences = [a - b for b, a in zip(before, after, strict=True)]
    return sum(differences) / len(differences), standard_error(differences)

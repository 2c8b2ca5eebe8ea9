"""The held-out evaluation: the reward of a task, or without one the loss or accuracy on the user's held-out rows.

Further tasks (``eval.task``) and, beside a task, the user's rows are among its metrics.

A reward is measured on fixed prompts with fixed sampling seeds at the training temperature.

The completions of one prompt are not independent, so the standard error is that of the P prompts' means:

    se = sd(m_1 … m_P) / √P,        and for a gain, the same over the differences of each prompt's mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from earnest.errors import ConfigError
from earnest.report.record import Measure
from earnest.rollouts import Attempt, describe
from earnest.runs.collect import attempt, spec_of
from earnest.runs.comparison import standard_error
from earnest.runs.own_data import HELDOUT_SEED, OwnMeasurement
from earnest.runs.setup import Setup
from earnest.tasks import Environment, Prompt, Task


@dataclass(frozen=True)
class HeldOutEvaluation:
    """One measurement: the mean of ``means``. They are each prompt's mean reward, in the order of the held-out prompts,
    or each row's part of a loss or accuracy."""

    step: int
    version: int
    means: tuple[float, ...]
    samples: int
    correct: float | None
    attempts: tuple[Attempt, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers on the completions, on further tasks, and on the held-out rows of the user's file."""
    own: OwnMeasurement | None = None
    measure: Measure = "reward"

    @classmethod
    def of(
        cls, attempts: Sequence[Attempt], step: int = 0, version: int = 0, further: Mapping[str, float] | None = None
    ) -> HeldOutEvaluation:
        """The measurement from graded completions; every prompt has the same number of them."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for a in attempts:
            rewards[a.rollout.prompt_index].append(a.grade.reward)
        means = tuple(sum(rewards[i]) / len(rewards[i]) for i in sorted(rewards))
        correct = sum(a.grade.correct for a in attempts) / len(attempts)
        metrics = describe(attempts) | dict(further or {})
        return cls(step, version, means, len(attempts) // len(means), correct, tuple(attempts), metrics)

    @property
    def value(self) -> float:
        return sum(self.means) / len(self.means)

    @property
    def se(self) -> float | None:
        return standard_error(self.means)

    def record(self, seconds: float) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        named: dict[str, Any] = {} if self.measure == "reward" else {"measure": self.measure}
        return named | {
            "kind": "eval",
            "step": self.step,
            "version": self.version,
            self.measure: self.value,
            "se": self.se,
            "prompts": len(self.means),
            "n": len(self.means) * self.samples,
            "correct": self.correct,
            "metrics": dict(self.metrics),
            "means": list(self.means),
            "seconds": seconds,
        }


def heldout(setup: Setup, task: Task | Environment | None = None) -> list[Prompt]:
    """The held-out prompts of the run's task, or of ``task``: the same at every evaluation and for every seed."""
    task = task or setup.task
    assert task is not None, "there are prompts only where there is a task"
    prompts = task.prompts("heldout", setup.config.eval.prompts, HELDOUT_SEED)
    if not prompts:
        raise ConfigError(f"task: {task.name} has no held-out prompts; use another task.")
    return prompts


def evaluate(setup: Setup, step: int) -> HeldOutEvaluation:
    """Measure the policy that would be deployed: the current one, without a guard's quarantine."""
    wanted, version, spec = setup.config.eval, setup.engine.version, spec_of(setup, HELDOUT_SEED)
    with setup.deployed():
        own = None if setup.data is None else setup.data.measure(setup.engine, wanted.prompts)
        further = {} if own is None else dict(own.metrics)
        for task in setup.further:
            found = HeldOutEvaluation.of(attempt(setup, heldout(setup, task), wanted.samples, spec, task).attempts)
            numbers = {"reward": found.value, "reward_se": found.se, "correct": found.correct}
            further |= {f"eval/{task.name}/{name}": value for name, value in numbers.items() if value is not None}
        if setup.task is None:
            assert own is not None, "a run without a task has held-out rows"
            return HeldOutEvaluation(step, version, own.parts, 1, None, (), further, own, own.measure)
        attempts = attempt(setup, heldout(setup), wanted.samples, spec).attempts
    return replace(HeldOutEvaluation.of(attempts, step, version, further), own=own)

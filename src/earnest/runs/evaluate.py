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

from rich.console import Console, ConsoleOptions, RenderResult

from earnest.errors import ConfigError
from earnest.report.record import Measure
from earnest.rollouts import Attempt, describe
from earnest.runs.collect import attempt
from earnest.runs.own_data import HELDOUT_SEED, OwnMeasurement, standard_error
from earnest.runs.setup import Setup
from earnest.tasks import Environment, Prompt, Task


@dataclass(frozen=True)
class HeldOutEvaluation:
    """One measurement: the mean of ``means``.

    They are each prompt's mean reward, in the order of the held-out prompts, or each row's part of a loss or accuracy.
    """

    step: int
    version: int
    means: tuple[float, ...]
    samples: int
    correct: float | None
    attempts: tuple[Attempt, ...]
    further: Mapping[str, float] = field(default_factory=dict)
    """Numbers on further tasks, and on the held-out rows of the user's file, where the run has one."""
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
        return cls(step, version, means, len(attempts) // len(means), correct, tuple(attempts), further or {})

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
            "metrics": describe(self.attempts) | dict(self.further),
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
    wanted, version = setup.config.eval, setup.engine.version
    with setup.deployed():
        own = None if setup.data is None else setup.data.measure(setup.engine, wanted.prompts)
        further = {} if own is None else dict(own.metrics)
        for task in setup.further:
            found = HeldOutEvaluation.of(attempt(setup, heldout(setup, task), wanted.samples, HELDOUT_SEED, task))
            numbers = {"reward": found.value, "reward_se": found.se, "correct": found.correct}
            further |= {f"eval/{task.name}/{name}": value for name, value in numbers.items() if value is not None}
        if setup.task is None:
            assert own is not None, "a run without a task has held-out rows"
            return HeldOutEvaluation(step, version, own.parts, 1, None, (), further, own, own.measure)
        attempts = attempt(setup, heldout(setup), wanted.samples, HELDOUT_SEED)
    return replace(HeldOutEvaluation.of(attempts, step, version, further), own=own)


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
    measure: Measure = "reward"
    perplexity: tuple[float, float] | None = None
    margin: tuple[float, float] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name = f"held-out {self.measure}"
        yield f"{name:<16} {_pm(self.before, self.before_se)} → [bold green]{_pm(self.after, self.after_se)}[/]"
        if self.measure != "reward":
            if self.perplexity is not None:
                yield f"perplexity       {self.perplexity[0]:.3f} → {self.perplexity[1]:.3f}"
            if self.margin is not None:
                yield f"margin           {self.margin[0]:.3f} → {self.margin[1]:.3f}  [dim](nats per token)[/]"
            size = f"standard errors over {self.prompts} rows"
            yield f"change           {_pm(self.gain, self.gain_se, '+')}  [dim]({size})[/]"
            return
        size = f"standard errors over {self.prompts} prompts, {self.samples} completions"
        yield f"gain             {_pm(self.gain, self.gain_se, '+')}  [dim]({size})[/]"


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``Comparison`` from two evaluation lines of metrics.jsonl."""
    gained, gained_se = gain(before["means"], after["means"])
    measure = after.get("measure", "reward")

    def both(name: str) -> tuple[float, float] | None:
        found = (before["metrics"].get(name), after["metrics"].get(name))
        return None if None in found else found

    return {
        "measure": measure,
        "perplexity": both("heldout/perplexity") if measure == "loss" else None,
        "margin": both("pairs/margin") if measure == "accuracy" else None,
        "before": before[measure],
        "after": after[measure],
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

"""The best evaluation of a run so far, by a number that it logs, and how many evaluations ago it was.

Everything is a function of the lines of metrics.jsonl, so a resumed run has the same best step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from earnest.config.loop import FALLING, BestConfig
from earnest.errors import ConfigError

STEP = "step/"


class Best:
    """``step`` and ``value`` of the best evaluation after step 0; ``since`` counts those after it."""

    def __init__(self, config: BestConfig, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.config = config
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0
        self._steps: list[Mapping[str, Any]] = []
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add a line of metrics.jsonl; True if it is the best evaluation so far."""
        if line["kind"] == "step":
            self._steps.append(line)
            return False
        steps, self._steps = self._steps, []
        name = self.config.metric
        if name.startswith(STEP):
            if not steps:
                return False
            value = mean_of([_of_step(step, name.removeprefix(STEP)) for step in steps])
        else:
            value = _of_evaluation(line, name)
        if line["step"] == 0:
            return False
        falls = self._falls(line)
        better = value is not None and (self.value is None or (value < self.value if falls else value > self.value))
        if better:
            self.step, self.value, self.since = int(line["step"]), value, 0
        else:
            self.since += 1
        return better

    def _falls(self, line: Mapping[str, Any]) -> bool:
        """Whether a smaller number is better."""
        if self.config.mode is not None:
            return self.config.mode == "min"
        name = line.get("measure", "reward") if self.config.metric == "heldout" else self.config.metric
        return str(name).endswith(FALLING)

    @property
    def ended(self) -> str | None:
        """Why the run stops now, or None."""
        patience = self.config.patience
        if patience is None or self.since < patience:
            return None
        count = f"{patience} evaluations" if patience > 1 else "evaluation"
        if self.value is None:
            return f"no finite {self.config.metric} in the last {count}"
        return f"no better {self.config.metric} in the last {count}; the best is {self.value:.4g} at step {self.step}"

    def record(self) -> dict[str, Any]:
        """The part of run.json about it."""
        return {"step": self.step, "metric": self.config.metric, "value": self.value}


def _of_evaluation(line: Mapping[str, Any], name: str) -> float | None:
    if name == "heldout":
        return _finite(line[line.get("measure", "reward")])
    return _finite(_look_up(line["metrics"], name, "evaluation"))


def _of_step(line: Mapping[str, Any], name: str) -> float | None:
    reward = {} if line.get("reward") is None else {"reward": line["reward"]["mean"]}
    own = {key: line.get(key) for key in ("loss", "grad_norm", "update_norm", "lr")}
    return _finite(_look_up(own | reward | dict(line["metrics"]), name, "step"))


def _look_up(numbers: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in numbers:
        prefix = STEP if what == "step" else ""
        there = ", ".join(prefix + key for key in sorted(numbers)) or "no further numbers"
        raise ConfigError(f"best.metric: the {what}s of this run log no {name}; there are heldout, {there}.")
    return numbers[name]


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are there; None without any."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None

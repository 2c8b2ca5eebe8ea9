"""What a run folder says, as typed records. docs/run-folder.md is the same page in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from earnest.errors import EarnestError

FORMAT = "earnest-run/1"

Status = Literal["running", "finished", "interrupted", "failed"]
Phase = Literal["before", "after", "train"]
Outcome = Literal["holds", "fails", "not declared"]
Level = Literal["info", "warning", "error"]


class ReportError(EarnestError):
    """A folder is not a run, or a file in it does not obey docs/run-folder.md."""


@dataclass(frozen=True)
class Header:
    """run.json."""

    recipe: str
    task: str
    model: str
    model_version: str
    adapter: str | None
    objective: str
    seed: int
    steps: int
    status: Status
    reason: str | None
    started: str
    updated: str
    steps_done: int
    seconds: float

    @property
    def policy(self) -> str:
        """The model and its version; a folder's last part where it was loaded from a path."""
        name = Path(self.model).name if Path(self.model).is_absolute() else self.model
        return f"{name} {self.model_version}".strip()


@dataclass(frozen=True)
class TermValue:
    """One term on one step; ``loss`` is before the weight, ``share`` its part of the gradient."""

    ran: str
    weight: float
    loss: float | None
    share: float | None
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class TrainReward:
    """Over one step's rollouts."""

    mean: float | None
    sd: float | None
    n: int


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl of kind "step"."""

    step: int
    version: int
    reward: TrainReward | None
    loss: float | None
    terms: Mapping[str, TermValue]
    skipped: tuple[str, ...]
    idle: Mapping[str, str]
    grad_norm: float | None
    update_norm: float | None
    lr: float | None
    passes: str | None
    micro_batches: int | None
    metrics: Mapping[str, float | None]
    seconds: Mapping[str, float | None]


@dataclass(frozen=True)
class Evaluation:
    """A line of metrics.jsonl of kind "eval"."""

    step: int
    version: int
    reward: float | None
    se: float | None
    prompts: int
    n: int
    correct: float | None
    means: tuple[float, ...] | None


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Sample:
    """A line of samples.jsonl."""

    phase: Phase
    step: int
    version: int
    prompt_id: str
    sample: int
    prompt: tuple[Message, ...]
    completion: str
    reward: float | None
    correct: bool | None
    feedback: str
    tokens: int | None


@dataclass(frozen=True)
class Check:
    """A law on a subject: a row of the verdict."""

    law: str
    subject: str
    measured: float | str | None
    expected: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Verdict:
    """verdict.json."""

    checks: tuple[Check, ...]
    step: int
    seconds: float | None
    not_applicable: int

    @property
    def holds(self) -> bool:
        return self.count("holds") > 0 and self.count("fails") == 0

    def count(self, outcome: Outcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)


@dataclass(frozen=True)
class Event:
    """A line of events.log."""

    time: str
    level: Level
    text: str


@dataclass(frozen=True)
class Change:
    """Held-out reward before and after, from the first and the last evaluation."""

    before: Evaluation
    after: Evaluation

    @property
    def gain(self) -> float | None:
        if self.before.reward is None or self.after.reward is None:
            return None
        return self.after.reward - self.before.reward

    @property
    def paired(self) -> bool:
        """Whether both evaluations say each prompt's mean, so that every prompt can be compared with itself."""
        before, after = self.before.means, self.after.means
        return before is not None and after is not None and len(before) == len(after) > 1

    @property
    def se(self) -> float | None:
        """Standard error of the gain: over the prompts' differences where they are known, else as if independent.

        The two evaluations share their prompts, so the second way overstates it as a rule.
        """
        if self.paired:
            assert self.before.means is not None and self.after.means is not None
            differences = [a - b for b, a in zip(self.before.means, self.after.means, strict=True)]
            return statistics.stdev(differences) / math.sqrt(len(differences))
        if self.before.se is None or self.after.se is None:
            return None
        return math.hypot(self.before.se, self.after.se)


@dataclass(frozen=True)
class Run:
    """A run folder, read once. ``gaps`` are sentences about what is missing or was repaired while reading."""

    folder: Path
    header: Header
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    samples: tuple[Sample, ...]
    verdict: Verdict | None
    events: tuple[Event, ...]
    config: str | None
    environment: Mapping[str, Any] | None
    gaps: tuple[str, ...]

    @property
    def change(self) -> Change | None:
        """None before the second evaluation, and where the last one is not of a later step than the first."""
        if len(self.evaluations) < 2 or self.evaluations[0].step >= self.evaluations[-1].step:
            return None
        return Change(self.evaluations[0], self.evaluations[-1])

    @property
    def pairs(self) -> list[tuple[Sample | None, Sample | None]]:
        """Before and after of the same held-out prompt and sampling seed, in the order of the file."""
        table: dict[tuple[str, int], list[Sample | None]] = {}
        for sample in self.samples:
            if sample.phase != "train":
                pair = table.setdefault((sample.prompt_id, sample.sample), [None, None])
                pair[0 if sample.phase == "before" else 1] = sample
        return [(before, after) for before, after in table.values()]

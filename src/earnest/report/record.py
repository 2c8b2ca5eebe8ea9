"""The records of a run folder: one model per file or line, for the writer (`runs/`) and the readers.

docs/run-folder.md describes the same records in words. Unknown keys are allowed. A number that is not finite is None.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, computed_field

from earnest.errors import EarnestError

FORMAT: Literal["earnest-run/1"] = "earnest-run/1"

Status = Literal["running", "finished", "interrupted", "failed"]
Phase = Literal["before", "after", "train"]
LawOutcome = Literal["holds", "fails", "warns", "not declared"]
Level = Literal["info", "warning", "error"]
Measure = Literal["reward", "loss", "accuracy"]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Numbers = Mapping[str, Number]


class ReportError(EarnestError):
    """A folder is not a run, or a file in it does not follow docs/run-folder.md."""


class Record(BaseModel):
    """Strict: a text is not a number, and true is not 1."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


def written(model: type[Record], data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` as its file holds it. A key or a value that the record does not declare is a bug of the writer."""
    undeclared = set(data) - set(model.model_fields)
    assert not undeclared or model.model_config.get("extra") == "allow", f"{model.__name__} lacks {undeclared}"
    return model.model_validate(data).model_dump(mode="json", exclude_unset=True)


class ModelRecord(Record):
    """The policy's model."""

    name: str
    version: str | None = None

    def __str__(self) -> str:
        """The model and its version; for a path, the name of the folder."""
        name = Path(self.name).name if Path(self.name).is_absolute() else self.name
        return f"{name} {self.version or ''}".strip()


class RunRecord(Record):
    """run.json. A run of replicas adds keys of its own."""

    model_config = ConfigDict(extra="allow")

    format: Literal["earnest-run/1"] = FORMAT
    recipe: str
    task: str
    model: ModelRecord
    adapter: str | None = None
    objective: str
    seed: NonNegativeInt
    steps: NonNegativeInt
    status: Status
    reason: str | None = None
    started: str
    updated: str
    steps_done: NonNegativeInt
    seconds: float
    data: Mapping[str, Any] | None = None
    """The user's own file, where the run has one: a hash of its rows, its layout, and the counts of its rows."""
    best: Mapping[str, Any] | None = None
    """The best checkpoint (``step``, ``metric``, ``value``), where the recipe has ``best``."""


class TermRecord(Record):
    """One term on one step; ``loss`` is before the weight, ``share`` is the term's part of the gradient. The loss of a
    ``surrogate`` (a term that reads advantages) has no meaning as a value."""

    kind: str | None = None
    weight: float
    loss: Number = None
    surrogate: bool = False
    share: Number = None
    ran: str
    metrics: Numbers = {}


class RewardRecord(Record):
    """The rewards of one step's rollouts."""

    mean: Number = None
    sd: Number = None
    n: NonNegativeInt


class StepRecord(Record):
    """A line of metrics.jsonl of kind "step"."""

    kind: Literal["step"] = "step"
    step: NonNegativeInt
    version: NonNegativeInt
    reward: RewardRecord | None = None
    loss: Number = None
    terms: Mapping[str, TermRecord]
    skipped: Annotated[tuple[str, ...], Field(strict=False)] = ()
    idle: Mapping[str, str] = {}
    learned_nothing: str | None = None
    """Why the step had nothing to learn from; None if it had something."""
    tokens: NonNegativeInt | None = None
    """Tokens that were trained on."""
    grad_norm: Number = None
    update_norm: Number = None
    lr: Number = None
    passes: str | None = None
    layout: str | None = None
    """"packed" with the attention that ran, or "padded" with the reason."""
    micro_batches: NonNegativeInt | None = None
    metrics: Numbers = {}
    seconds: Numbers = {}


class EvalRecord(Record):
    """A line of metrics.jsonl of kind "eval"."""

    kind: Literal["eval"] = "eval"
    step: NonNegativeInt
    version: NonNegativeInt
    measure: Measure = "reward"
    """Which number is the result: the reward of a task, or the loss or accuracy on the user's held-out rows."""
    reward: Number = None
    loss: Number = None
    accuracy: Number = None
    se: Number = None
    prompts: NonNegativeInt
    n: NonNegativeInt
    correct: Number = None
    means: Annotated[tuple[float, ...] | None, Field(strict=False)] = None
    metrics: Numbers = {}
    seconds: Number = None

    @property
    def value(self) -> float | None:
        return {"reward": self.reward, "loss": self.loss, "accuracy": self.accuracy}[self.measure]


class MessageRecord(Record):
    """A message of a prompt; other keys are kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | None = None

    @property
    def text(self) -> str:
        """The content, then the message's other keys (a tool call) as JSON, so that the whole prompt is shown."""
        rest = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        parts = (self.content, json.dumps(rest, ensure_ascii=False) if rest else None)
        return "\n".join(part for part in parts if part)


class SegmentRecord(Record):
    """Tokens of one author in a row; those of the policy, or of the user's data, were trained."""

    row: NonNegativeInt
    author: Literal["policy", "tool", "user", "template", "data"]
    text: str
    tokens: NonNegativeInt
    taught: NonNegativeInt = 0
    """Tokens that a teacher with a hint covered."""


class SampleRecord(Record):
    """A line of samples.jsonl."""

    phase: Phase
    step: NonNegativeInt
    version: NonNegativeInt
    prompt_id: str
    sample: NonNegativeInt
    prompt: Annotated[tuple[MessageRecord, ...], Field(strict=False)]
    completion: str
    reward: Number = None
    correct: bool | None = None
    feedback: str = ""
    tokens: NonNegativeInt | None = None
    cut_off: bool = False
    """Whether the completion ended at the largest number of new tokens, and not by itself."""
    loss: Number = None
    """Of a held-out row of the user's file: nats per trained token of its own answer."""
    margin: Number = None
    """Of a held-out pair: mean log-prob per token of the chosen answer minus that of the rejected one."""
    ending: str | None = None
    turn_rewards: Annotated[tuple[float, ...], Field(strict=False)] = ()
    segments: Annotated[tuple[SegmentRecord, ...], Field(strict=False)] = ()
    teacher_read: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The prompts, with the hint, that the teacher of a conversation read; one for each row that it taught."""

    @property
    def of_data(self) -> bool:
        """Whether it is a training row of the user's file, and not something that the policy sampled."""
        return any(segment.author == "data" for segment in self.segments)

    @property
    def conversation(self) -> bool:
        return bool(self.segments) and not self.of_data


class CheckRecord(Record):
    """A law on a subject: a row of the verdict."""

    law: str
    subject: str
    measured: Number | str = None
    expected: str
    outcome: LawOutcome
    detail: str = ""

    @property
    def during_training(self) -> bool:
        """Whether the watch added it at the end of the run, and not the check before the first step."""
        return "during training" in self.subject


class VerdictRecord(Record):
    """verdict.json."""

    step: NonNegativeInt
    seconds: Number = None
    not_applicable: NonNegativeInt = 0
    checks: Annotated[tuple[CheckRecord, ...], Field(strict=False)]

    @computed_field  # type: ignore[prop-decorator]  # pydantic's documented form, which mypy does not support
    @property
    def holds(self) -> bool:
        return self.count("holds") > 0 and self.count("fails") == 0

    def count(self, outcome: LawOutcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)


class EventRecord(Record):
    """A line of events.log: UTC time, level and a sentence."""

    time: str
    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.time} {self.level} {self.text}"


@dataclass(frozen=True)
class Change:
    """The held-out result before and after, from the first and the last evaluation."""

    before: EvalRecord
    after: EvalRecord

    @property
    def gain(self) -> float | None:
        if self.before.value is None or self.after.value is None:
            return None
        return self.after.value - self.before.value

    @property
    def paired(self) -> bool:
        """Whether both evaluations record each prompt's mean, so that every prompt can be compared with itself."""
        before, after = self.before.means, self.after.means
        return before is not None and after is not None and len(before) == len(after) > 1

    @property
    def se(self) -> float | None:
        """Standard error of the gain: of the prompts' differences if they are known, else as if independent. The two
        evaluations share their prompts, so the second formula usually overstates it."""
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
    header: RunRecord
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvalRecord, ...]
    samples: tuple[SampleRecord, ...]
    verdict: VerdictRecord | None
    events: tuple[EventRecord, ...]
    config: str | None
    environment: Mapping[str, Any] | None
    gaps: tuple[str, ...]

    @property
    def measure(self) -> Measure:
        return self.evaluations[-1].measure if self.evaluations else "reward"

    @property
    def change(self) -> Change | None:
        """The first evaluation and the best one where the run names it, else the last. None before the second
        evaluation, or if the last one is not from a later step than the first."""
        if len(self.evaluations) < 2 or self.evaluations[0].step >= self.evaluations[-1].step:
            return None
        best = None if self.header.best is None else self.header.best["step"]
        after = next((e for e in self.evaluations if e.step == best), self.evaluations[-1])
        return Change(self.evaluations[0], after)

    @property
    def pairs(self) -> list[tuple[SampleRecord | None, SampleRecord | None]]:
        """Before and after of the same held-out prompt and sampling seed, in the order of the file."""
        table: dict[tuple[str, int], list[SampleRecord | None]] = {}
        for sample in self.samples:
            if sample.phase != "train":
                pair = table.setdefault((sample.prompt_id, sample.sample), [None, None])
                pair[0 if sample.phase == "before" else 1] = sample
        return [(before, after) for before, after in table.values()]

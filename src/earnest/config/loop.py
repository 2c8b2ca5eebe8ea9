"""The keys of the training loop: the same for a recipe and for ``en.train``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_serializer, model_validator

from earnest import plugins
from earnest.config.kinds import Strict, Whole, key_of
from earnest.errors import ConfigError
from earnest.models.sampling import SampleSpec
from earnest.rollouts.conversing import TurnSettings
from earnest.settings import make


class TaskConfig(Strict):
    """The task to learn; ``task: NAME`` is short for ``task: {name: NAME}``. ``fields`` holds the task's settings."""

    hidden_fields: ClassVar[tuple[str, ...]] = ("fields",)

    name: Annotated[str, Field(min_length=1), AfterValidator(plugins.absolute)] = Field(
        description="`earnest tasks` lists them; `earnest tasks NAME` shows the settings. Your own: `my_task.py:Name`"
    )
    fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, dict):
            rest = {key: value for key, value in data.items() if key != "name"}
            return {key: value for key, value in data.items() if key == "name"} | {"fields": rest}
        if not isinstance(data, cls):
            raise ConfigError(f"must be a text, got {data!r}.")
        return data

    @model_serializer(mode="plain")
    def _flat(self) -> Any:
        return {"name": self.name, **self.fields} if self.fields else self.name


class SamplingConfig(Strict):
    """How the completions of a step are sampled."""

    prompts_per_step: Whole = Field(8, description="training prompts per step")
    completions_per_prompt: Whole = Field(8, description="completions per prompt; together they are a group")
    max_new_tokens: int = key_of(SampleSpec, "max_new_tokens", default=16)
    temperature: float = Field(1.0, gt=0, description="the sampling temperature, also of the evaluation")
    workers: int = Field(0, ge=0, description="Ray actors that sample; 0: the training process samples")


class EvalConfig(Strict):
    """Held-out prompts, the same for every seed and at every evaluation."""

    every: int = Field(20, ge=0, description="steps between evaluations; 0: only before and after")
    prompts: Whole = Field(64, description="held-out prompts")
    samples: Whole = Field(4, description="completions per prompt, at the training temperature with fixed seeds")
    task: list[TaskConfig] = Field(
        default_factory=list,
        description="further tasks to measure: a name, a mapping as under `task`, or a list of these",
    )

    @field_validator("task", mode="before")
    @classmethod
    def _one_or_many(cls, given: Any) -> Any:
        return [] if given is None else given if isinstance(given, list) else [given]


RISING = ("reward", "accuracy", "margin", "correct")
FALLING = ("loss", "perplexity")


class BestConfig(Strict):
    """Which checkpoint is the run's result, and when the run stops for it; ``best: NUMBER`` is short for ``metric``."""

    metric: str = Field(
        "heldout",
        min_length=1,
        description="`heldout` (the evaluation's result), a number of the evaluations (`heldout/perplexity`, "
        "`eval/reverse/reward`), or of the steps since the last one (`step/entropy`, `step/loss`): their mean",
    )
    mode: Literal["max", "min"] | None = Field(
        None, description="whether more or less is better; none: known for rewards, accuracies, margins and losses"
    )
    patience: Whole | None = Field(
        None, description="the run stops after this many evaluations in a row without a better one; none: never"
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"metric": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _agree(self) -> BestConfig:
        if self.mode is None and self.metric != "heldout" and not self.metric.endswith((*RISING, *FALLING)):
            raise ConfigError(f"best.mode: whether more {self.metric} is better is not known; give max or min")
        return self


class CheckpointConfig(Strict):
    """The checkpoints that a stopped run continues from."""

    every: Whole = Field(20, description="steps between checkpoints; there is always one at the end")
    keep: Whole = Field(2, description="checkpoints that are kept; with 2, a damaged one leaves the previous one")


class SamplesConfig(Strict):
    """What is written to samples.jsonl."""

    heldout: int = Field(8, ge=0, description="held-out completions shown before and after")
    train: int = Field(2, ge=0, description="training rollouts kept at each step")


class LoopConfig(Strict):
    """The settings of the training loop: the same for a recipe and for ``en.train``."""

    steps: Whole = Field(description="batches to train on")
    seed: int = Field(0, ge=0, lt=2**31, description="decides prompts, samples and the adapter's initialization")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    turns: TurnSettings = Field(default_factory=TurnSettings, description="conversations with an environment")
    advantages: Literal["group", "batch", "none", "leave_one_out"] | None = Field(
        None, description="how rewards become advantages; none: as the terms define them, `group` if they allow any"
    )
    updates_per_batch: Whole = Field(1, description="optimizer steps on each batch")
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    best: BestConfig | None = Field(None, description="none: the last step is the result")
    samples: SamplesConfig = Field(default_factory=SamplesConfig)
    max_grader_errors: float = Field(
        0.1, ge=0, le=1, description="the run stops when a larger share of a step's gradings raises"
    )
    on_stall: Literal["warn", "stop"] = Field(
        "warn", description="what a warning of the watch does: only warn, or also stop the run, which then exits with 1"
    )
    shares_every: int = Field(
        1,
        ge=0,
        description="steps between measurements of each term's share of the gradient (one pass per term); 0: never",
    )
    check: bool = Field(True, description="prove the step before training: every term and parameter gets a gradient")
    loggers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        default_factory=list, description="loggers besides metrics.jsonl; each needs the extra of the same name"
    )
    out: str | None = Field(None, min_length=1, description="the run folder; none: runs/<recipe>-<time>")

    @field_validator("turns", mode="before")
    @classmethod
    def _settings_of_turns(cls, given: Any) -> Any:
        return make(TurnSettings, given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _compares_evaluations(self) -> LoopConfig:
        if self.best is not None and not self.eval.every:
            raise ConfigError("best: compares the evaluations of a run, and eval.every is 0; set it, or leave best out")
        return self

    @property
    def updates(self) -> int:
        """Optimizer steps in the whole run; the learning rate's schedule extends over them."""
        return self.steps * self.updates_per_batch

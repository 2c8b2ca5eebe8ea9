"""The settings of the experiment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from earnest.config.schema import AdapterConfig, OptimizerConfig, Strict, Whole
from earnest.errors import ConfigError, EarnestError
from earnest.settings import FieldProblem, make, plain


class ContrastConfig(Strict):
    """Instructions for both poles, if the axis' own do not suit the model."""

    high: list[str] = Field(min_length=1, description="system prompts that request the trait")
    low: list[str] = Field(min_length=1, description="system prompts that request its opposite")


class EvalConfig(Strict):
    """Held-out questions, probes and texts."""

    prompts: Whole = Field(64, description="held-out questions whose answers are graded for the trait")
    probes: Annotated[int, Field(ge=1, le=50)] = Field(50, description="forced-choice probes")
    texts: Whole = Field(40, description="plain held-out texts for the perplexity")
    floor: float = Field(0.3, gt=0, lt=1, description="coherence below which a loop stops and a score is 0")


class FullConfig(Strict):
    """What ``--full`` runs."""

    rounds: Whole = Field(8, description="rounds of each loop")
    seeds: list[int] = Field(default_factory=lambda: [0, 1, 2], min_length=1, description="one loop each")
    rate: float = Field(
        0.5, gt=0, lt=1, description="share of the steps of an unguarded round in which a calibrated barrier would act"
    )


class HealConfig(Strict):
    """One loop, or with ``--full`` every arm."""

    experiment: Literal["heal"]
    description: str = Field("", description="a line for `earnest recipes`")
    model: str = Field("nano", description="name, Hugging Face id or folder")
    task: str = Field("style/warmth", description="a style/… task: its axis gives the contrast and the grader")
    contrast: ContrastConfig | None = Field(None, description="the two poles in words; none: the axis' own")
    rounds: Whole = Field(3, description="rounds of steer and heal")
    steering: dict[str, Any] = Field(default_factory=dict, description="fields of experiments.heal.loop.Steering")
    filter: dict[str, Any] = Field(default_factory=dict, description="fields of earnest.steering.Filter")
    healing: dict[str, Any] = Field(default_factory=dict, description="fields of earnest.steering.Healing")
    adapter: AdapterConfig = Field(description="what each round trains")
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig.model_validate({}))
    eval: EvalConfig = Field(default_factory=EvalConfig)
    full: FullConfig = Field(default_factory=FullConfig)
    seed: int = Field(0, ge=0, lt=2**31, description="decides questions, samples and the adapters' initial tensors")
    out: str | None = Field(None, min_length=1, description="the folder; none: runs/heal-<time>")

    @model_validator(mode="after")
    def _resolve(self) -> HealConfig:
        self.axis()
        for name in ("steering", "filter", "healing"):
            try:
                setattr(self, name, plain(getattr(self, f"build_{name}")()))
            except FieldProblem as problem:
                raise ConfigError(f"{name}.{problem}") from None
            except EarnestError as problem:
                raise ConfigError(f"{name}: {problem}") from None
        return self

    def poles(self) -> ContrastConfig:
        """The contrast as it is used."""
        own = self.axis()
        return self.contrast or ContrastConfig(high=own["high"]["system"], low=own["low"]["system"])

    def axis(self) -> dict[str, Any]:
        """The style axis that the task names."""
        from earnest.tasks.style import AXES

        family, _, name = self.task.partition("/")
        if family != "style" or name not in AXES:
            raise ConfigError(
                f"task is {self.task!r}; steering needs two poles: {', '.join(f'style/{a}' for a in AXES)}."
            )
        return AXES[name]

    def build_steering(self) -> Any:
        from experiments.heal.loop import Steering

        return make(Steering, self.steering)

    def build_filter(self) -> Any:
        from earnest.steering import Filter

        return make(Filter, self.filter)

    def build_healing(self, **changes: Any) -> Any:
        from earnest.steering import Healing

        return make(Healing, self.healing | changes)

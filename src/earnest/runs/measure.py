"""`earnest eval RUN`: a saved adapter and its base model on the held-out prompts of a task.

Prompts and sampling seeds are those of a run's own evaluations, so with the same task, prompts and samples the result
equals the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console, ConsoleOptions, RenderResult

from earnest.adapters.trained import load_trained
from earnest.config.load import check_mapping
from earnest.config.loop import EvalConfig, SamplingConfig
from earnest.config.schema import Strict, TaskConfig, Whole
from earnest.config.text import parse_file
from earnest.engines import LocalEngine
from earnest.errors import ConfigError
from earnest.models import SampleSpec
from earnest.rollouts.attempts import attempt
from earnest.runs.evaluate import Comparison, HeldOutEvaluation, compared
from earnest.runs.folder import read_json
from earnest.runs.own_data import HELDOUT_SEED


class MeasureConfig(Strict):
    """The keys of `earnest eval RUN`. A key that is not given has the run's own value."""

    task: TaskConfig | None = Field(None, description="none: the run's")
    prompts: Whole | None = Field(None, description="held-out prompts; none: the run's eval.prompts")
    samples: Whole | None = Field(None, description="completions per prompt; none: the run's eval.samples")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; none: the run's")
    max_new_tokens: Whole | None = Field(None, description="a completion is cut off here; none: the run's")
    model: str | None = Field(
        None, min_length=1, description="base model to use instead of the one that the adapter names"
    )


@dataclass(frozen=True, kw_only=True)
class Measured(Comparison):
    """``before`` is the base model, ``after`` the same with the adapter."""

    task: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield f"task             {self.task}  [dim](the base model → with the adapter)[/]"
        yield from super().__rich_console__(console, options)


def measure(place: Path, overrides: Sequence[str] = (), say: Callable[[str], None] = lambda _: None) -> Measured:
    """Sample and grade the held-out prompts with the base model and with the adapter in ``place``."""
    wanted = check_mapping(MeasureConfig, {}, overrides)
    own = parse_file(place / "config.yaml") if (place / "config.yaml").is_file() else {}
    named = wanted.task or _own_task(place, own)
    task = named.build()
    measured = EvalConfig.model_validate(own.get("eval", {}))
    sampling = SamplingConfig.model_validate(own.get("sampling", {}))
    count, samples = wanted.prompts or measured.prompts, wanted.samples or measured.samples
    spec = SampleSpec(
        max_new_tokens=wanted.max_new_tokens or sampling.max_new_tokens,
        temperature=sampling.temperature if wanted.temperature is None else wanted.temperature,
        seed=HELDOUT_SEED,
    )
    policy, adapter = load_trained(place, wanted.model)
    engine = LocalEngine(policy, adapter)
    prompts = task.prompts("heldout", count, HELDOUT_SEED)

    def evaluated() -> dict[str, Any]:
        return HeldOutEvaluation.of(attempt(engine.sample, policy, task, prompts, samples, spec)).record(0.0)

    say(f"sampling {count} prompts with {policy.name}")
    with adapter.off():
        before = evaluated()
    say(f"sampling {count} prompts with the adapter")
    return Measured(**compared(before, evaluated()), task=task.name)


def _own_task(place: Path, config: Mapping[str, Any]) -> TaskConfig:
    """The task of the run in ``place``: from its config, or by its name if ``en.train`` started it."""
    if config.get("data") is not None and config.get("task") is None:
        raise ConfigError(f"task: {place} was trained on a file, so it has no task of its own; give task=NAME.")
    name = config.get("task") or (read_json(place / "run.json").get("task") if config else None)
    if name is None:
        raise ConfigError(f"task: {place} is not a run folder, so its task is not known; give task=NAME.")
    return TaskConfig.model_validate(name)

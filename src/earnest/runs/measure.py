"""`earnest eval RUN`: a saved adapter and its base model on the held-out prompts of a task, or on the held-out rows of
the file that the run was trained on.

Prompts, rows and sampling seeds are those of a run's own evaluations, so with the same task, prompts and samples the
result equals the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console, ConsoleOptions, RenderResult

from earnest.adapters.trained import load_trained
from earnest.config.loading import check_mapping, data_settings
from earnest.config.loop import EvalConfig, SamplingConfig
from earnest.config.schema import Strict, TaskConfig, Whole
from earnest.config.text import parse_file
from earnest.engines import LocalEngine
from earnest.errors import ConfigError
from earnest.models import SampleSpec
from earnest.rollouts import TurnSettings, graded
from earnest.runs.comparison import Comparison, compared
from earnest.runs.evaluate import HeldOutEvaluation
from earnest.runs.folder import read_json
from earnest.runs.own_data import HELDOUT_SEED, OwnData
from earnest.settings import make
from earnest.tasks import get_task


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
        what = "task" if self.measure == "reward" else "data"
        yield f"{what:<17}{self.task}  [dim](the base model → with the adapter)[/]"
        yield from super().__rich_console__(console, options)


def measure(place: Path, overrides: Sequence[str] = (), say: Callable[[str], None] = lambda _: None) -> Measured:
    """Measure the base and the adapter in ``place``: grade samples of held-out prompts, or score held-out rows."""
    wanted = check_mapping(MeasureConfig, {}, overrides)
    own = parse_file(place / "config.yaml") if (place / "config.yaml").is_file() else {}
    if wanted.task is None and own.get("data") is not None and own.get("task") is None:
        return _measure_rows(place, wanted, own, say)
    named = wanted.task or _own_task(place, own)
    task = get_task(named.name, named.fields)
    measured = EvalConfig.model_validate(own.get("eval", {}))
    sampling = SamplingConfig.model_validate(own.get("sampling", {}))
    turns = make(TurnSettings, own.get("turns", {}))
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
        return HeldOutEvaluation.of(graded(engine, task, prompts, samples, spec, turns).attempts).record(0.0)

    say(f"sampling {count} prompts with {policy.name}")
    with adapter.off():
        before = evaluated()
    say(f"sampling {count} prompts with the adapter")
    return Measured(**compared(before, evaluated()), task=task.name)


def _measure_rows(
    place: Path, wanted: MeasureConfig, config: Mapping[str, Any], say: Callable[[str], None]
) -> Measured:
    """The same on at most ``prompts`` held-out rows of the run's own file; nothing is sampled."""
    for key in ("samples", "temperature", "max_new_tokens"):
        if getattr(wanted, key) is not None:
            raise ConfigError(f"{key}: {place} is measured on rows of its file, not on samples; leave it out.")
    policy, adapter = load_trained(place, wanted.model)
    data = OwnData.load(data_settings(config["data"]), policy, say)
    known = read_json(place / "run.json").get("data") or {}
    if known.get("sha256") not in (None, data.dataset.sha256):
        raise ConfigError(f"data: {data.path} has changed since {place} was trained; give the same rows, or task=NAME.")
    engine = LocalEngine(policy, adapter)
    count = wanted.prompts or EvalConfig.model_validate(config.get("eval", {})).prompts

    def evaluated() -> dict[str, Any]:
        found = data.measure(engine, count)
        if found is None:
            raise ConfigError(f"data.heldout: {place} holds out no row of {data.path}; give task=NAME.")
        return HeldOutEvaluation(0, 0, found.parts, 1, None, (), found.metrics, found, found.measure).record(0.0)

    with adapter.off():
        before = evaluated()
    return Measured(**compared(before, evaluated()), task=data.name)


def _own_task(place: Path, config: Mapping[str, Any]) -> TaskConfig:
    """The task of the run in ``place``: from its config, or by its name if ``en.train`` started it."""
    name = config.get("task") or (read_json(place / "run.json").get("task") if config else None)
    if name is None:
        raise ConfigError(f"task: {place} is not a run folder, so its task is not known; give task=NAME.")
    return TaskConfig.model_validate(name)

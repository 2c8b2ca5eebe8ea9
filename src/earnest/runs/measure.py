"""`earnest eval RUN`: a saved adapter and its base model on the held-out prompts of a task.

Prompts and sampling seeds are those of a run's own evaluations: with the same task, prompts and samples the result is
the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.console import Console, ConsoleOptions, RenderResult

from earnest.adapters.trained import load_trained
from earnest.config import RunConfig, load_file
from earnest.config.load import check_mapping
from earnest.config.schema import Strict, TaskConfig, Whole
from earnest.engines import LocalEngine
from earnest.errors import ConfigError
from earnest.models import SampleSpec
from earnest.runs.evaluate import HELDOUT_SEED, Comparison, compared, standard_error
from earnest.tasks import Task, grade_all


class MeasureConfig(Strict):
    """The keys of `earnest eval RUN`; what is not given is the run's own."""

    task: TaskConfig | None = Field(None, description="none: the run's")
    prompts: Whole | None = Field(None, description="held-out prompts; none: the run's eval.prompts")
    samples: Whole | None = Field(None, description="completions per prompt; none: the run's eval.samples")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; none: the run's")
    max_new_tokens: Whole | None = Field(None, description="a completion is cut off here; none: the run's")
    model: str | None = Field(None, min_length=1, description="another base model than the adapter names")


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
    run = load_file(place / "config.yaml") if (place / "config.yaml").is_file() else None
    named = wanted.task or (run.task if run is not None else None)
    if named is None:
        raise ConfigError(f"task: {place} is no run folder, so it has no task of its own; give task=NAME.")
    task: Task = named.build()
    count, samples, spec = _how(wanted, run)
    policy, adapter = load_trained(place, wanted.model)
    engine = LocalEngine(policy, adapter)
    prompts = task.prompts("heldout", count, HELDOUT_SEED)
    rendered = [policy.render(p.messages) for p in prompts]

    def mean_rewards() -> dict[str, object]:
        rollouts = engine.sample(rendered, samples, spec)
        asked = [prompts[r.prompt_index] for r in rollouts]
        grades = grade_all(task, asked, [policy.decode(r.tokens) for r in rollouts])
        rewards: list[list[float]] = [[] for _ in prompts]
        for rollout, grade in zip(rollouts, grades, strict=True):
            rewards[rollout.prompt_index].append(grade.reward)
        means = [sum(r) / len(r) for r in rewards]
        mean = sum(means) / len(means)
        return {"means": means, "reward": mean, "se": standard_error(means), "prompts": count, "n": len(rollouts)}

    say(f"sampling {count} prompts with {policy.name}")
    with adapter.off():
        before = mean_rewards()
    say(f"sampling {count} prompts with the adapter")
    return Measured(**compared(before, mean_rewards()), task=task.name)


def _how(wanted: MeasureConfig, run: RunConfig | None) -> tuple[int, int, SampleSpec]:
    """(prompts, completions per prompt, sampling): what is asked for, else the run's, else a run's defaults."""
    measured = run.eval if run is not None else RunConfig.model_fields["eval"].get_default(call_default_factory=True)
    sampled = (
        run.sampling if run is not None else RunConfig.model_fields["sampling"].get_default(call_default_factory=True)
    )
    temperature = sampled.temperature if wanted.temperature is None else wanted.temperature
    longest = wanted.max_new_tokens or sampled.max_new_tokens
    spec = SampleSpec(max_new_tokens=longest, temperature=temperature, seed=HELDOUT_SEED)
    return wanted.prompts or measured.prompts, wanted.samples or measured.samples, spec

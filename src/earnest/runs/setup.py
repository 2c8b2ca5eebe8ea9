"""A config into the parts of a run: policy, adapter, engine, objective, task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from earnest.adapters import Adapter, attach
from earnest.config import RunConfig
from earnest.engines import LocalEngine
from earnest.engines.base import Rollout
from earnest.engines.estimator import check_terms
from earnest.errors import ConfigError
from earnest.guards import DirectionGuard
from earnest.models import Policy, SampleSpec, load
from earnest.objectives import Objective
from earnest.runs.guarding import guard_of
from earnest.runs.preferences import Preferences
from earnest.runs.sampling import samplers_of
from earnest.seeds import derive
from earnest.signals import ROLES, EMATeacher, LiveTeacher, Role, TeacherPolicy
from earnest.signals.reference import wanted_signals
from earnest.sync.pool import Samplers
from earnest.tasks import PromptStream, Task, get_task

CALIBRATION_PROMPTS = 64


@dataclass(frozen=True)
class Setup:
    """Everything that the loop works with."""

    config: RunConfig
    task: Task
    policy: Policy
    adapter: Adapter
    engine: LocalEngine
    objective: Objective
    teacher: TeacherPolicy = field(default_factory=LiveTeacher)
    preferences: Preferences | None = None
    samplers: Samplers | None = None

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt by the policy as it is now: sampled here, or by samplers that get it."""
        return (self.samplers or self.engine).sample(prompts, n, spec)

    def close(self) -> None:
        """End what was started with it."""
        if self.samplers is not None:
            self.samplers.close()

    def deployed(self) -> AbstractContextManager[None]:
        """The policy that would be deployed, inside the block: without a guard's quarantine."""
        return self.engine.guard.ablated() if self.engine.guard is not None else nullcontext()

    def describe(self) -> dict[str, object]:
        """The part of run.json that says what this run is."""
        targets = ", ".join(self.adapter.targets)
        guard = self.engine.guard
        guarded = f", guarded by {guard.describe()}" if isinstance(guard, DirectionGuard) else ""
        terms = " + ".join(f"{w.weight:g} × {w.term.label}" for w in self.objective.terms)
        return {
            "task": self.task.name,
            "model": {"name": self.policy.name, "version": self.policy.version},
            "adapter": f"{self.adapter.variant!r} on {targets}{guarded}",
            "objective": terms,
            "seed": self.config.seed,
            "steps": self.config.steps,
            **({} if self.preferences is None else {"data": self.preferences.describe()}),
        }


def build(config: RunConfig, say: Callable[[str], None]) -> Setup:
    """Make the parts; what is cheap to get wrong is looked up before the model is loaded."""
    task = get_task(config.task.name, config.task.fields)
    objective = config.build_objective()
    roles = {role for w in objective.live() for role in w.term.roles}
    if "rollout" in roles and config.sampling.completions_per_prompt < 2:
        raise ConfigError(
            "sampling.completions_per_prompt: an advantage compares a prompt's completions, so rollouts need "
            "at least 2, got 1."
        )
    if config.data is not None and not {"chosen", "rejected"} <= _named(objective):
        raise ConfigError(
            f"data: the pairs of {config.data} would train nobody; add a term on preferences, such as dpo or simpo."
        )
    if config.engine.estimator == "sampled":
        check_terms(objective, config.sampling.temperature)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.engine.kind == "tinker":
        from earnest.runs import remote

        return remote.build(config, task, objective, say)
    policy, adapter = adapted(config, task, say)
    preferences = None if config.data is None else Preferences.load(Path(config.data), policy, say)
    teacher = config.teacher.build(adapter)
    if config.teacher.kind != "live" and "teacher" not in wanted_signals(objective):
        raise ConfigError(
            f"teacher: {config.teacher.kind} would teach nobody; add a term that reads a teacher, such as sdpo."
        )
    if config.guard is not None:
        say("directions for the guard")
    engine = LocalEngine(
        policy,
        adapter,
        config.optimizer.build(),
        guard=guard_of(config, policy, adapter, objective),
        outer=teacher if isinstance(teacher, EMATeacher) else None,
        max_grad_norm=config.optimizer.max_grad_norm,
        micro_tokens=config.micro_tokens,
        estimator=config.engine.estimator,
    )
    samplers = samplers_of(config, task, engine, say)
    return Setup(config, task, policy, adapter, engine, objective, teacher, preferences, samplers)


def adapted(config: RunConfig, task: Task, say: Callable[[str], None]) -> tuple[Policy, Adapter]:
    """The policy and its untrained adapter: the same wherever this config is built."""
    say(f"loading {config.model}")
    policy = load(config.model, device=config.device, dtype=config.dtype, say=say)
    if config.chat_template is not None:
        policy.tokenizer.chat_template = config.chat_template
    variant = config.adapter.build()
    calibration = None
    if variant.wants_calibration():
        prompts = PromptStream(task, derive(config.seed, "calibration")).next(CALIBRATION_PROMPTS)
        calibration = [torch.tensor([policy.render(p.messages)], device=policy.device) for p in prompts]
    adapter = attach(
        policy,
        variant,
        targets=config.adapter.targets,
        layers=config.adapter.layers,
        calibration=calibration,
        seed=config.seed,
    )
    return policy, adapter


def _named(objective: Objective) -> set[Role]:
    """Roles that a live term reads on purpose, not because it reads every row."""
    return {role for w in objective.live() if w.term.roles != ROLES for role in w.term.roles}

"""From a config to the parts of a run: policy, adapter, engine, objective, task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from earnest.adapters import Adapter, attach
from earnest.config import LoopConfig, RunConfig
from earnest.data.dataset import DataSettings
from earnest.engines import LocalEngine
from earnest.engines.base import AdapterLike, Engine
from earnest.engines.estimator import check_terms
from earnest.engines.mesh import Mesh
from earnest.errors import ConfigError
from earnest.guards import DirectionGuard, Directions, Erase, Route, directions_from_gradients, read_triples
from earnest.models import Policy, load
from earnest.models.protocol import PolicyLike
from earnest.objectives import Objective
from earnest.objectives.preference import Preference
from earnest.rollouts.attempts import Sample
from earnest.runs.own_data import OwnData
from earnest.runs.sampling import samplers_of
from earnest.seeds import derive
from earnest.signals import EMATeacher, LiveTeacher, TeacherPolicy
from earnest.sync.pool import SamplerPool
from earnest.tasks import Environment, PromptStream, Task, get_task

CALIBRATION_PROMPTS = 64


@dataclass(frozen=True)
class Setup:
    """Everything that the loop works with. ``model`` is the name that the saved adapter gives its base model."""

    config: LoopConfig
    model: str
    task: Task | Environment | None
    engine: Engine
    objective: Objective
    teacher: TeacherPolicy = field(default_factory=LiveTeacher)
    data: OwnData | None = None
    samplers: SamplerPool | None = None
    chat_template: str | None = None

    @property
    def name(self) -> str:
        """What the run learns: its task, or its file."""
        if self.task is not None:
            return self.task.name
        assert self.data is not None, "a run without a task has data"
        return self.data.name

    @functools.cached_property
    def further(self) -> tuple[Task | Environment, ...]:
        """The further tasks of ``eval.task``."""
        tasks = tuple(get_task(task.name, task.fields) for task in self.config.eval.task)
        names = [task.name for task in (*tasks, *([] if self.task is None else [self.task]))]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"eval.task: {double} is measured already; name each further task once.")
        return tasks

    @property
    def policy(self) -> PolicyLike:
        return self.engine.policy

    @property
    def adapter(self) -> AdapterLike:
        return self.engine.adapter

    @property
    def mesh(self) -> Mesh:
        """The processes that train together."""
        return Mesh() if self.engine.local is None else self.engine.local.mesh

    def require_local(self, purpose: str) -> LocalEngine:
        """The local engine; raises if the run trains on a service."""
        if self.engine.local is None:
            raise ConfigError(f"engine.kind: {purpose} reads weights and gradients, which a service does not show.")
        return self.engine.local

    @property
    def sample(self) -> Sample:
        """The function that samples with the current policy: the engine's own, or that of the samplers elsewhere."""
        return self.elsewhere or self.engine.sample

    @property
    def elsewhere(self) -> Sample | None:
        """The function of the samplers elsewhere; None: the engine samples."""
        return None if self.samplers is None else self.samplers.sample

    def close(self) -> None:
        """Stop the samplers."""
        if self.samplers is not None:
            self.samplers.close()

    def deployed(self) -> AbstractContextManager[None]:
        """The policy that would be deployed, inside the block: without a guard's quarantine."""
        return self.engine.guard.ablated() if self.engine.guard is not None else nullcontext()

    def describe(self) -> dict[str, object]:
        """The part of run.json that describes the run."""
        targets = ", ".join(self.adapter.targets)
        guard = self.engine.guard
        guarded = f", guarded by {guard.describe()}" if guard is not None else ""
        terms = " + ".join(f"{w.weight:g} × {w.term.label}" for w in self.objective.terms)
        return {
            "task": self.name,
            "model": {"name": self.policy.name, "version": self.policy.version},
            "adapter": f"{self.adapter.variant!r} on {targets}{guarded}",
            "objective": terms,
            "seed": self.config.seed,
            "steps": self.config.steps,
            **({} if self.data is None else {"data": self.data.describe()}),
        }


def build(config: RunConfig, say: Callable[[str], None], mesh: Mesh | None = None) -> Setup:
    """Make the parts. Checks that need no model come before the model is loaded."""
    from earnest.runs import ranks, remote

    mesh = mesh or ranks.join(config)
    task = None if config.task is None else get_task(config.task.name, config.task.fields)
    objective = config.build_objective()
    check_groups(config, objective)
    wants = objective.wants()
    if config.task is None and "rollout" in wants.roles and not (config.data and wants.any_row):
        raise ConfigError(
            "task: is required, because a term of the objective reads rollouts of a task's prompts; give task=NAME, or "
            "data of prompts with grade=…, or for demonstrations objective=[{kind: sft}]."
        )
    if config.engine.estimator == "sampled":
        check_terms(objective, config.sampling.temperature)
    if config.engine.kind == "tinker":
        remote.check(config, objective)
    if config.teacher.kind != "live" and "teacher" not in objective.signals():
        raise ConfigError(f"teacher: no term reads the {config.teacher.kind} teacher; add one that does, such as sdpo.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.engine.kind == "tinker":
        return remote.build(config, task, objective, say)
    policy, adapter = adapted(config, task, say)
    if config.engine.offload and policy.device.type == "cpu":
        raise ConfigError("engine.offload: the weights are on the CPU already; leave it out.")
    data = own_data(config.data, policy, objective, task, say)
    if config.teacher.outside:
        how = {"dtype": config.dtype, "micro_tokens": config.micro_tokens, "say": say}
        teacher = config.teacher.build_outside(policy, objective, **how)
    else:
        teacher = config.teacher.build(adapter)
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
        pack=config.engine.pack,
        packed_attention=config.engine.packed_attention,
        mesh=mesh,
        offload=config.engine.offload,
        checkpoint_activations=config.engine.checkpoint_activations,
        compile=config.engine.compile,
    )
    outside = config.sampler is not None or config.sampling.workers > 0
    samplers = samplers_of(config, task, engine, say) if task is not None and outside else None
    return Setup(config, config.model, task, engine, objective, teacher, data, samplers, config.chat_template)


def own_data(
    settings: DataSettings | None,
    policy: PolicyLike,
    objective: Objective,
    task: Task | Environment | None,
    say: Callable[[str], None],
) -> OwnData | None:
    """Read the user's rows, and refuse those that no term reads or that cannot be evaluated."""
    if settings is None:
        return None
    found, wants = OwnData.load(settings, policy, say), objective.wants()
    roles = found.roles if task is None and wants.any_row else wants.roles
    if not found.roles <= roles:
        what, terms = {
            "pair": ("pairs", "preferences, such as dpo or simpo"),
            "judged": ("judged answers", "them: kto"),
        }.get(found.kind, ("rows", "them: sft"))
        raise ConfigError(f"data: no term reads the {what} of {found.path}; add a term on {terms}.")
    paired = [w.term.label for w in objective.live() if isinstance(w.term, Preference)]
    if found.kind == "judged" and paired:
        raise ConfigError(
            f"data: {paired[0]} compares pairs, and the rows of {found.path} are single answers with a label; take "
            "kto, or give prompt, chosen and rejected."
        )
    if task is None and roles - found.roles:
        raise ConfigError(
            f"task: is required, because a term of the objective reads {' and '.join(sorted(roles - found.roles))} "
            f"rows, and {found.path} has none."
        )
    if task is None and not found.dataset.size("heldout"):
        raise ConfigError(
            f"data.heldout: {settings.heldout} of {found.path} holds out no row of {found.dataset.counts.rows}, so "
            "nothing would be evaluated; give a larger share, or a file."
        )
    return found


def check_groups(config: LoopConfig, objective: Objective) -> None:
    """Raise if a rollout would be the only completion of its prompt, so that it has no advantage, or if a KL baseline
    would have no second prompt."""
    roles = {role for w in objective.live() for role in w.term.roles}
    if "rollout" in roles and config.sampling.completions_per_prompt < 2:
        raise ConfigError(
            "sampling.completions_per_prompt: an advantage compares a prompt's completions, so rollouts need "
            "at least 2, got 1."
        )
    baselines = [w.term.label for w in objective.live() if "kl_baseline" in w.term.signals()]
    if baselines and config.sampling.prompts_per_step < 2:
        raise ConfigError(
            f"sampling.prompts_per_step: the KL baseline of {baselines[0]} compares answers after another prompt, so a "
            "step needs at least 2 prompts, got 1; or set its baseline to zero."
        )


def adapted(config: RunConfig, task: Task | Environment | None, say: Callable[[str], None]) -> tuple[Policy, Adapter]:
    """The policy and its untrained adapter. Every process that builds this config gets the same weights."""
    say(f"loading {config.model}")
    policy = load(config.model, device=config.device, dtype=config.dtype, say=say)
    if config.chat_template is not None:
        policy.tokenizer.chat_template = config.chat_template
    variant = config.adapter.build()
    calibration = None
    if variant.wants_calibration():
        if task is None:
            raise ConfigError(f"adapter: {config.adapter.kind} is calibrated on a task's prompts; give a task.")
        prompts = PromptStream(task, derive(config.seed, "calibration")).next(CALIBRATION_PROMPTS)
        calibration = [torch.tensor([policy.render(p.messages)], device=policy.device) for p in prompts]
    adapter = attach(
        policy,
        variant,
        targets=config.adapter.targets,
        layers=config.adapter.layers,
        calibration=calibration,
        seed=config.seed,
        modules_to_save=config.adapter.modules_to_save,
    )
    return policy, adapter


def guard_of(config: RunConfig, policy: Policy, adapter: Adapter, objective: Objective) -> DirectionGuard | None:
    """The guard; None without ``guard:``. Directions from triples use the run's objective, temperature and length."""
    wanted = config.guard
    if wanted is None:
        return None
    kind = Route if wanted.kind == "route" else Erase
    settings: dict[str, Any] = {name: getattr(wanted, name) for name in ("gate", "overshoot", "preserve", "at")}
    if wanted.directions is not None:
        return kind(Directions.load(wanted.directions), **settings)
    assert wanted.triples is not None
    triples = read_triples(wanted.triples)
    bare = LocalEngine(policy, adapter, config.optimizer.build(), micro_tokens=config.micro_tokens)

    sampling = config.sampling
    how: dict[str, Any] = {"temperature": sampling.temperature, "max_length": sampling.max_new_tokens}
    how |= {"top": wanted.top, "floor": wanted.floor}
    extract = functools.partial(directions_from_gradients, bare, triples, objective, **how)
    if wanted.refresh and config.replicas > 1:
        raise ConfigError(
            f"guard.refresh: {config.replicas} replicas have different parameters between two synchronizations and "
            "would extract different directions; set guard.refresh=0, or replicas=1"
        )
    again: dict[str, Any] = {"every": wanted.refresh, "extract": extract} if wanted.refresh else {}
    return kind(extract(), **settings, **again)

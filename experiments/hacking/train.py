"""One job: an arm's training run and its evaluations.

The reward comes from the exploitable checker. The oracle is used in ``measure`` and for the log, never for a reward, an
advantage, a direction or the choice of a stored rollout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from earnest.adapters import AntiPaSTO, attach
from earnest.engines import AdamW, LocalEngine
from earnest.engines.base import Guard, Rollout
from earnest.guards import (
    DirectionGuard,
    Directions,
    Erase,
    Perturb,
    PerturbRoute,
    Route,
    Triple,
    directions_from_gradients,
    random_directions,
    shuffled_directions,
)
from earnest.models import SampleSpec, load
from earnest.objectives import GRPO, Objective
from earnest.rollouts import batch_of
from earnest.runs.evaluate import HELDOUT_SEED
from earnest.seeds import derive
from earnest.signals import Batch
from earnest.signals.advantages import with_advantages
from earnest.tasks import Grade, Prompt, PromptStream, get_task, grade_all
from experiments.hacking.config import Config
from experiments.hacking.contrasts import clean_triples, hacking_triples
from experiments.hacking.panel import Panel
from experiments.hacking.plan import Job
from experiments.hacking.pool import Pool

OBJECTIVE = Objective.of(GRPO(clip=0.2))
Tell = Callable[[int], None]


@dataclass(frozen=True)
class Trained:
    """The result of a job: JSON for the tables, and the trained parameters."""

    record: dict[str, Any]
    parameters: dict[str, Tensor]


def run_job(config: Config, job: Job, pool: Pool | None, tell: Tell = lambda _: None) -> Trained:
    """Train, evaluating every policy of the job at every ``eval_every`` steps."""
    begun = time.monotonic()
    engine, guard, directions = build(config, job)
    watched: dict[str, Callable[[], AbstractContextManager[None]]] = {job.arm: nullcontext}
    if isinstance(guard, Panel):
        watched |= {name: route.ablated for name, route in guard.routes.items()}
    series: dict[str, list[dict[str, Any]]] = {name: [] for name in watched}
    log: list[dict[str, float]] = []
    stream = PromptStream(get_task("holes"), derive(job.seed, "train") % 2**31)

    def look(step: int) -> None:
        for name, policy in watched.items():
            if name.startswith("route-") and step != config.steps:
                continue  # leave-one-out is read at the end
            with policy():
                series[name].append({"step": step, **measure(engine, config)})

    look(0)
    for step in range(1, config.steps + 1):
        prompts = stream.next(config.prompts_per_step) if pool is None else pool.prompts(config, job.seed, step)
        log.append(train_step(engine, config, job, prompts, pool, step))
        if step % config.eval_every == 0 or step == config.steps:
            look(step)
        tell(step)
    record = {
        "job": job.name,
        "arm": job.arm,
        "seed": job.seed,
        "without": job.without,
        "pool": job.pool,
        "directions": {name: {"source": d.source, "count": len(d), **d.facts} for name, d in directions.items()},
        "series": series,
        "log": log,
        "seconds": time.monotonic() - begun,
    }
    return Trained(record, engine.adapter.state_dict())


def train_step(
    engine: LocalEngine, config: Config, job: Job, prompts: Sequence[Prompt], pool: Pool | None, step: int
) -> dict[str, float]:
    """Sample, grade, one update on the groups whose rewards differ."""
    grades, batch = rows_with_spread(engine, config, job, prompts, pool, step)
    line = {"step": float(step), **_rates(grades)}
    if batch is not None:
        report = engine.step(batch, OBJECTIVE)
        line |= {"update_norm": report.update.update_norm, **report.update.guard}
    return line


def rows_with_spread(
    engine: LocalEngine, config: Config, job: Job, prompts: Sequence[Prompt], pool: Pool | None, step: int
) -> tuple[list[Grade], Batch | None]:
    """Every answer's grade, and the rows of groups whose rewards differ; None: there is no such group."""
    spec = SampleSpec(max_new_tokens=config.max_new_tokens, temperature=1.0, seed=derive(job.seed, "sampling", step))
    rendered = [engine.policy.render(p.messages) for p in prompts]
    rollouts = engine.sample(rendered, config.completions_per_prompt, spec)
    if pool is not None:
        rollouts = pool.replace(rollouts, prompts, config)
    grades = _grade(engine, prompts, rollouts)
    batch = with_advantages(batch_of(rollouts), [g.reward for g in grades])
    assert batch.advantages is not None
    chosen = batch.row[batch.advantages != 0].unique()
    return grades, batch.rows(chosen) if len(chosen) else None


def _grade(engine: LocalEngine, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Grade]:
    asked = [prompts[r.prompt_index] for r in rollouts]
    return grade_all(get_task("holes"), asked, [engine.policy.decode(r.tokens) for r in rollouts])


def measure(engine: LocalEngine, config: Config) -> dict[str, Any]:
    """Rates on held-out prompts, the same prompts and random numbers for every arm and step; by hole, too."""
    prompts = get_task("holes").prompts("heldout", config.eval_prompts, HELDOUT_SEED)
    spec = SampleSpec(max_new_tokens=config.max_new_tokens, temperature=1.0, seed=HELDOUT_SEED)
    rendered = [engine.policy.render(p.messages) for p in prompts]
    grades = _grade(engine, prompts, engine.sample(rendered, config.eval_samples, spec))
    n = config.eval_samples
    exploited = [sum(bool(g.extras["exploited"]) for g in grades[i : i + n]) / n for i in range(0, len(grades), n)]
    solved = [sum(g.correct for g in grades[i : i + n]) / n for i in range(0, len(grades), n)]
    holes = [str(p.data["hole"]) for p in prompts]
    return _rates(grades) | {"exploited_means": exploited, "solved_means": solved, "holes": holes}


def _rates(grades: Sequence[Grade]) -> dict[str, float]:
    attempted = [g for g in grades if g.extras["attempted"]]
    return {
        "reward": _mean([g.reward for g in grades]),
        "solved": _mean([g.correct for g in grades]),
        "exploited": _mean([bool(g.extras["exploited"]) for g in grades]),
        "attempted": len(attempted) / len(grades),
        "exploited_of_attempted": _mean([bool(g.extras["exploited"]) for g in attempted]) if attempted else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def build(config: Config, job: Job) -> tuple[LocalEngine, Guard | None, dict[str, Directions]]:
    """The engine with the job's guard, and the first directions of each guard by name."""
    plain = make_engine(config, job.seed, None)
    here: dict[str, LocalEngine] = {"engine": plain}  # a guard is made before the engine that it extracts on

    def extract(without: str | None = None, clean: bool = False) -> Directions:
        make = clean_triples if clean else functools.partial(hacking_triples, without=without)
        return extract_directions(here["engine"], config, make(config.triples, job.seed))

    def guard_of(name: str, without: str | None) -> DirectionGuard:
        """ "erase", "route:random", "erase@gradient", …"""
        family, _, control = name.partition(":")
        kind: type[DirectionGuard] = Route if family.startswith("route") else Erase
        settings: dict[str, Any] = {"gate": config.gate, "overshoot": config.overshoot}
        settings |= {"at": "gradient"} if family.endswith("@gradient") else {}
        again = functools.partial(extract, without, control == "clean")
        first = again()
        if control == "noise":
            return (PerturbRoute if kind is Route else Perturb)(first, seed=job.seed, **settings)
        if control in ("random", "shuffled"):
            make = random_directions if control == "random" else shuffled_directions
            return kind(make(first, job.seed), **settings)
        renew: dict[str, Any] = {"every": config.refresh, "extract": again} if config.refresh else {}
        return kind(first, **settings, **renew)

    guard: Guard | None = None
    guards: dict[str, DirectionGuard] = {}
    if job.arm == "none":
        guards = {name: guard_of(name, name.partition("-without-")[2] or None) for name in job.routes}
        guard = Panel(guards) if guards else None
    else:
        guards[job.arm] = guard_of(job.arm, job.without)
        guard = guards[job.arm]
    found = {name: g.directions for name, g in guards.items()}
    plain.adapter.detach()
    here["engine"] = make_engine(config, job.seed, guard)
    return here["engine"], guard, found


def make_engine(config: Config, seed: int, guard: Guard | None) -> LocalEngine:
    policy = load(config.model)
    variant = AntiPaSTO(rank=None, block=0, gain="delta")
    adapter = attach(policy, variant, targets=tuple(config.targets), seed=seed)
    return LocalEngine(policy, adapter, AdamW(lr=config.lr), guard=guard)


def extract_directions(engine: LocalEngine, config: Config, triples: list[Triple]) -> Directions:
    return directions_from_gradients(
        engine, triples, OBJECTIVE, top=config.top, floor=config.floor, max_length=config.max_new_tokens, validate=False
    )

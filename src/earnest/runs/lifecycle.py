"""Start a run, resume one, or only check its step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from earnest import report
from earnest.adapters.trained import TEMPLATE
from earnest.config import LoopConfig, RunConfig, changed_keys, dump, load_file
from earnest.disk import write_text
from earnest.errors import CheckpointError, ConfigError
from earnest.proving import prove
from earnest.runs import environment, ranks, verdicts
from earnest.runs.ahead import steps_recorded
from earnest.runs.comparison import Comparison, compared
from earnest.runs.folder import RunFolder, default_place, read_json, require_free
from earnest.runs.loggers import open_loggers
from earnest.runs.loop import TrainingLoop, conversation_verdict, probe_batch
from earnest.runs.preflight import preflight
from earnest.runs.progress import laws_on, note_on, reporter_on
from earnest.runs.setup import Setup, build
from earnest.tasks import is_environment
from earnest.tasks.audit import audit_grader, built_in
from earnest_audit import Verdict

FROM_PYTHON = "python"
"""The name that stands for the recipe in a run that ``en.train`` started."""

MAY_CHANGE = re.compile(r"steps|engine\.(shard|replicate|tensor)|task\..*\bmax_(calls|tokens)")
"""Keys that a resumed run may change."""

C = TypeVar("C", bound=LoopConfig)

ResumeReplicas = Callable[[RunFolder, RunConfig, Console], "Finished"]
"""Continues the run in an opened folder."""


@dataclass(frozen=True, kw_only=True)
class Finished(Comparison):
    """The result of a run: the policy before and after it. ``seconds`` is training time."""

    folder: Path
    seconds: float
    adapter: Path
    report: Path
    problem: str | None = None
    """Why the run learned little or nothing, if three steps in a row (or all) had nothing to learn from; or the
    warning that stopped it."""
    stalled: bool = False
    """Whether the watch stopped the run (``on_stall: stop``)."""
    best: int | None = None
    """The step of the best checkpoint, whose weights are the adapter's (``best``)."""

    @property
    def exit_code(self) -> int:
        return 1 if self.stalled else 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield ""
        yield from super().__rich_console__(console, options)
        yield f"training took    {self.seconds:.0f} s"
        if self.best is not None:
            yield f"best checkpoint  step {self.best}, which is the adapter's and the result above"
        if self.problem is not None:
            yield Text(f"warning          {self.problem}", style="bold yellow")
        yield Text(f"{'report':<16} {self.report}", no_wrap=True, overflow="ignore")
        yield Text(f"{'chat with it':<16} earnest chat --adapter {self.folder}", no_wrap=True, overflow="ignore")


def start(
    recipe: str, config: RunConfig, console: Console | None = None, *, ready: Callable[[], None] | None = None
) -> Finished:
    """Train from the beginning, into a new folder, in this process: ``diloco.launch.start`` starts replicas.

    ``ready`` is called once everything is checked, before the folder is made.
    """
    console = ranks.console_of(console)
    _require_one_process(config)
    mesh = ranks.join(config)
    place = mesh.from_first(Path(config.out) if config.out is not None else default_place(recipe))
    own = ranks.own_place(mesh, place)
    require_free(own)
    setup = build(config, note_on(console), mesh)
    try:
        preflight(setup)
        if ready is not None:
            ready()
        header = {"recipe": recipe, **setup.describe()}
        run = RunFolder.create(own, config, setup.policy, header)
        ranks.settle(mesh, place, own)
    except BaseException:
        setup.close()
        raise
    return go(setup, run, console, resumed=False)


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    *,
    replicas: ResumeReplicas | None = None,
) -> Finished:
    """Continue a run from its newest whole checkpoint. Its config may only be repeated, or ``steps`` raised.

    ``replicas`` (``diloco.launch.resume``) continues a run with replicas; without it such a run is refused.
    """
    console = ranks.console_of(console)
    own = ranks.own_copy(folder)
    run = RunFolder.open(own)
    try:
        config = _config_to_resume(run, overrides)
        if config.replicated and replicas is not None:
            return replicas(run, config, console)
        _require_one_process(config)
        _set_threads(config, folder)
        mesh = ranks.join(config)
        ranks.settle(mesh, folder, own)
        setup = build(config, note_on(console), mesh)
        compare_environments(run, setup)
    except BaseException:
        run.close()
        raise
    return go(setup, run, console, resumed=True)


def replay(folder: Path, overrides: Sequence[str] = (), console: Console | None = None) -> Finished:
    """Train an asynchronous run again, bit for bit, from the rollouts that it recorded: no sampler is needed.

    Every step's weights are compared with the recorded ones. ``overrides`` may name the new folder, ``out=DIR``.
    """
    console = console or Console()
    recorded = load_file(folder / "config.yaml")
    wanted = load_file(folder / "config.yaml", overrides)
    if changed := changed_keys(recorded, wanted):
        raise ConfigError(
            f"{', '.join(changed)}: a replay keeps the run's config; leave it out. Only out= may be given."
        )
    steps_recorded(folder, recorded.steps)
    place = Path(wanted.out) if wanted.out is not None else folder.with_name(f"{folder.name}-replay")
    require_free(place)
    _set_threads(recorded, folder)
    sampling = recorded.sampling.model_copy(update={"workers": 0})
    setup = build(recorded.model_copy(update={"sampler": None, "sampling": sampling}), note_on(console))
    header = {"recipe": f"replay of {folder.name}", **setup.describe()}
    run = RunFolder.create(place, recorded, setup.policy, header)
    return go(setup, run, console, resumed=False, replay=folder)


def _set_threads(config: RunConfig, folder: Path) -> None:
    """As many threads as the run in ``folder`` had: another number sums in another order."""
    threads = read_json(folder / "environment.json").get("threads")
    if config.threads is None and isinstance(threads, int):
        torch.set_num_threads(threads)


def _require_one_process(config: RunConfig) -> None:
    if config.repeat is not None:
        raise ConfigError("repeat: this starts one run; `earnest run` and earnest.runs.repeat start one for each seed.")
    if config.replicated:
        raise ConfigError(
            f"replicas is {config.replicas} and store is {config.store}: `earnest run` and earnest.diloco.launch train "
            "with replicas; use one of them, or set replicas=1 and leave store out."
        )


def check(config: RunConfig, console: Console | None = None, *, quick: bool = False) -> Verdict:
    """Prove the step of a config without training it, and audit the user's own grader; nothing is written."""
    console = console or Console()
    if config.engine.kind != "local":
        raise ConfigError("engine.kind: the laws read gradients, which a service does not show; set engine.kind=local.")
    setup = build(config, note_on(console))
    try:
        batch = probe_batch(setup)
        with laws_on(console) as progress:
            found = prove(setup.require_local("an audit"), setup.objective, batch, quick=quick, progress=progress)
            found += conversation_verdict(setup)
        if setup.task is None or is_environment(setup.task) or built_in(setup.task):
            return found
        title = f"the grader of {setup.task.name} and the training step, checked"
        return replace(found, findings=(*audit_grader(setup.task).findings, *found.findings), title=title)
    finally:
        setup.close()


def go(setup: Setup, run: RunFolder, console: Console, resumed: bool, replay: Path | None = None) -> Finished:
    """Train in this folder, from its beginning or from its newest checkpoint; then close both."""
    try:
        loop = TrainingLoop(setup, run, reporter_on(console), [], replay=replay)
        if resumed:
            loop.restore()
        trained = sum(p.numel() for p in setup.adapter.parameters())
        count = f"{trained:,}" if trained else "an uncounted number of"
        described = f"{setup.describe()['adapter']}: {count} parameters; run folder {run.path}"
        return complete(loop, console, [setup.policy.describe(), described])
    finally:
        setup.close()
        run.close()
        ranks.leave(setup.mesh)


def complete(loop: TrainingLoop, console: Console, introduction: Sequence[str]) -> Finished:
    """Train the steps that are left, then save the adapter, write the report and return the result."""
    setup, run, config = loop.setup, loop.run, loop.setup.config
    for line in introduction:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    wanted = config.loggers if setup.mesh.rank == 0 else []
    loop.loggers += open_loggers(wanted, run.path, config.model_dump(mode="json"), loop.step)
    _warn_of_another_horizon(loop, run.header.get("steps", config.steps))
    loop.train()
    with loop.writing():
        with setup.deployed():
            adapter = setup.adapter.save(run.path / "adapter", base_model=setup.model)
        if setup.chat_template is not None:
            (adapter / TEMPLATE).write_text(setup.chat_template, encoding="utf-8")
        for check in loop.watch.checks():
            verdicts.add(run.path, check)
        status = "finished" if loop.stalled is None else "failed"
        run.update(status=status, reason=loop.ended, steps_done=loop.step, seconds=round(loop.seconds, 3))
        run.event("info", "finished" if loop.ended is None else f"stopped after step {loop.step}: {loop.ended}")
        page = report.write(run.path)
    return Finished(
        **compared(loop.evaluations[0], loop.result),
        folder=run.path,
        seconds=loop.seconds,
        adapter=Path(adapter),
        report=Path(page),
        problem=loop.stalled or loop.watch.problem(),
        stalled=loop.stalled is not None,
        best=None if loop.best is None else loop.best.step,
    )


def _warn_of_another_horizon(loop: TrainingLoop, before: int) -> None:
    """A schedule that extends over the whole run has other rates where a resumed run gets more steps."""
    schedule, steps = loop.setup.engine.optimizer_spec.schedule, loop.setup.config.steps
    if steps == before or schedule is None or not schedule.open_ended:
        return
    loop.warn(
        f"steps raised from {before} to {steps}: the {schedule.kind} schedule now extends over {steps} steps, so from "
        f"step {loop.step + 1} on the learning rate is that of the longer run"
    )


def _config_to_resume(run: RunFolder, overrides: Sequence[str]) -> RunConfig:
    path = run.path / "config.yaml"
    if run.header.get("recipe") == FROM_PYTHON:
        raise ConfigError(
            f"{run.path} was started by en.train; continue it with the same objects: "
            f"en.train(…, out={str(run.path)!r}, resume=True)."
        )
    return continued(run, load_file(path), load_file(path, overrides))


def continued(run: RunFolder, old: C, new: C) -> C:
    """``new``, if it differs from ``old`` only by more steps, a judge's budget or the ranks; else raise. Steps and
    budgets are written to the folder's config."""
    different = changed_keys(old, new)
    changed = [key for key in different if not MAY_CHANGE.fullmatch(key)]
    if new.out is not None:
        changed.append("out")
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: a resumed run keeps its config; "
            "leave it out, or start a new run. Only steps and the budget of a judge may change."
        )
    if new.steps < old.steps:
        raise ConfigError(f"steps: a resumed run needs at least its {old.steps} steps, got {new.steps}; leave it out.")
    kept = [key for key in different if not key.startswith("engine.")]
    if kept:
        write_text(run.path / "config.yaml", dump(new))
        steps = f" (steps from {old.steps} to {new.steps})" if new.steps != old.steps else ""
        run.event("info", f"changed on resuming: {', '.join(kept)}{steps}")
    return new


def compare_environments(run: RunFolder, setup: Setup) -> None:
    """Warn if the software differs, because then bits may differ; raise if the base weights or the pairs differ."""
    then, now = read_json(run.path / "environment.json"), environment.describe(setup.policy)
    if then.get("base") != now["base"]:
        raise CheckpointError(f"model: the weights of {setup.model} have changed since {run.path} began; use the same.")
    known = read_json(run.path / "run.json").get("data")
    if setup.data is not None and known is not None and known["sha256"] != setup.data.dataset.sha256:
        raise CheckpointError(f"data: {setup.data.path} has changed since {run.path} began; use the same rows.")
    old, new = then.get("packages", {}), now["packages"]
    drift = [
        f"{name} {old.get(name)} → {new.get(name)}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    ]
    drift += [
        f"{key} {then.get(key)} → {now[key]}"
        for key in ("earnest", "python", "device", "dtype", "threads")
        if then.get(key) != now[key]
    ]
    if drift:
        run.event("warning", f"resumed in another environment, so bits may differ: {', '.join(drift)}")

"""``en.train``: the loop of ``earnest run`` on Python objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from earnest.config import LoopConfig
from earnest.config.loading import check_mapping
from earnest.config.text import parse_file
from earnest.data.dataset import DataSettings
from earnest.engines.base import Engine
from earnest.errors import CheckpointError, ConfigError
from earnest.objectives import Objective, Term
from earnest.runs.folder import RunFolder, default_place, require_free
from earnest.runs.lifecycle import FROM_PYTHON, Finished, compare_environments, continued, go
from earnest.runs.preflight import preflight
from earnest.runs.progress import note_on
from earnest.runs.setup import Setup, check_groups, own_data
from earnest.signals import EMATeacher, LiveTeacher, TeacherPolicy
from earnest.tasks import Environment, Task, get_task

SAME = ("task", "model", "adapter", "objective")
"""The keys of run.json that must be the same when a run continues."""


def train(
    engine: Engine,
    task: Task | Environment | str | None,
    objective: Objective | Term,
    *,
    steps: int,
    teacher: TeacherPolicy | None = None,
    data: str | Path | DataSettings | None = None,
    pairs: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    console: Console | None = None,
    **settings: Any,
) -> Finished:
    """Train the engine's adapter on ``steps`` batches, with check, evaluations, checkpoints and report in a run folder.

    ``settings`` are the keys of a recipe that concern the loop, such as ``seed=1``, ``eval={"every": 5}`` or
    ``sampling={"prompts_per_step": 4}`` (docs/runs.md). ``data`` are your own rows, a file or
    ``DataSettings`` (docs/runs.md); ``task`` may be None where they are the rows of every term. ``pairs`` is the older
    name of ``data``. ``resume`` continues the run in ``out`` from its newest checkpoint, with the same objects.
    """
    objective, console = Objective.of(objective), console or Console()
    task = get_task(task) if isinstance(task, str) else task
    place = None if out is None else Path(out)
    if resume and place is None:
        raise ConfigError("resume: give the folder of the run to continue, out=…")
    config = check_mapping(LoopConfig, {"steps": steps, **settings})
    check_groups(config, objective)
    if config.sampling.workers:
        raise ConfigError("sampling.workers: Ray samplers build their policy from a recipe; use `earnest run`, or 0.")
    if teacher is not None and "teacher" not in objective.signals():
        raise ConfigError(
            "teacher: no term of the objective reads a teacher; add SDPO(), for example, or leave it out."
        )
    if isinstance(teacher, EMATeacher) and (engine.local is None or engine.local.outer is not teacher):
        raise ConfigError(
            "teacher: an EMA teacher must follow its engine's updates; make LocalEngine(…, outer=teacher)."
        )
    data = pairs if data is None else data
    if task is None and data is None:
        raise ConfigError("task: is required; give a task, or your own rows with data=FILE.")
    rows = DataSettings(train=str(data)) if isinstance(data, str | Path) else data
    own = own_data(rows, engine.policy, objective, task, note_on(console))
    setup = Setup(config, engine.policy.name, task, engine, objective, teacher or LiveTeacher(), own)
    preflight(setup)
    if not resume:
        place = place or default_place(FROM_PYTHON)
        require_free(place)
        header = {"recipe": FROM_PYTHON, **setup.describe()}
        run = RunFolder.create(place, config, engine.policy, header)
        return go(setup, run, console, resumed=False)
    assert place is not None
    run = RunFolder.open(place)
    try:
        described = setup.describe()
        changed = [key for key in SAME if run.header.get(key) != described[key]]
        if run.header.get("recipe") != FROM_PYTHON or changed:
            what = f"another {' and '.join(changed)}" if changed else "a recipe"
            raise CheckpointError(f"{place} was started with {what}; continue a run with the same objects.")
        continued(run, check_mapping(LoopConfig, parse_file(place / "config.yaml")), config)
        compare_environments(run, setup)
    except BaseException:
        run.close()
        raise
    return go(setup, run, console, resumed=True)

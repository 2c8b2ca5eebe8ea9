"""Tasks by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from earnest.errors import nearest
from earnest.tasks.base import Task, TaskError, TaskInfo, UnknownTask


@functools.cache
def _builtin() -> dict[str, Task]:
    from earnest.tasks.holes import HOLES
    from earnest.tasks.puzzles import PUZZLES
    from earnest.tasks.style import STYLES

    tasks: list[Task] = [*PUZZLES, *STYLES, *HOLES]
    return {task.name: task for task in tasks}


def get_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """The task of this name: a built-in one, ``reasoning_gym/<dataset>`` or ``verifiers/<environment>``.

    ``settings`` are those of the dataset or environment; built-in tasks have none.
    """
    from earnest.tasks import external_reasoning_gym, external_verifiers

    given = dict(settings or {})
    if name in _builtin():
        if given:
            raise TaskError(f"task.{next(iter(given))}: the task {name} has no settings; leave it out.")
        return _builtin()[name]
    family, _, rest = name.partition("/")
    if family == "reasoning_gym" and rest:
        return external_reasoning_gym.load(rest, given)
    if family == "verifiers" and rest:
        return external_verifiers.load(rest, given)
    known = [*_builtin(), "reasoning_gym/<dataset>", "verifiers/<environment>"]
    raise UnknownTask(f"task {name!r} is unknown: {nearest(name, known)} `earnest tasks` lists all of them.")


def list_tasks() -> list[TaskInfo]:
    """Every task that has a name here: the built-in ones, and those of the installed extras."""
    from earnest.tasks import external_reasoning_gym, external_verifiers

    infos = [TaskInfo(task.name, task.description, "built-in") for task in _builtin().values()]
    return [*infos, *external_reasoning_gym.infos(), *external_verifiers.infos()]

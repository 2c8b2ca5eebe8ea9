"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from earnest.errors import nearest
from earnest.registry import Registry
from earnest.tasks.base import Task, TaskError, TaskInfo, UnknownTask

TASKS: Registry[Task] = Registry("task", "earnest.tasks", TaskError)

T = TypeVar("T", bound=Task | type[Task])


def register(task: T) -> T:
    """Make a task of your own known by its ``name``: an instance, or a class that is made without arguments."""
    made = task() if isinstance(task, type) else task
    TASKS.add(made.name, made, own=False)
    return task


def get_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """The task of this name: a registered one, ``reasoning_gym/<dataset>`` or ``verifiers/<environment>``.

    ``settings`` are those of the dataset or environment; registered tasks have none.
    """
    from earnest.tasks import external_reasoning_gym, external_verifiers

    given = dict(settings or {})
    if name in TASKS:
        if given:
            raise TaskError(f"task.{next(iter(given))}: the task {name} has no settings; leave it out.")
        return TASKS[name]
    family, _, rest = name.partition("/")
    if family == "reasoning_gym" and rest:
        return external_reasoning_gym.load(rest, given)
    if family == "verifiers" and rest:
        return external_verifiers.load(rest, given)
    known = [*TASKS, "reasoning_gym/<dataset>", "verifiers/<environment>"]
    raise UnknownTask(f"task {name!r} is unknown: {nearest(name, known)} `earnest tasks` lists all of them.")


def list_tasks() -> list[TaskInfo]:
    """Every task that has a name here: the registered ones, and those of the installed extras."""
    from earnest.tasks import external_reasoning_gym, external_verifiers

    infos = [
        TaskInfo(name, task.description, "imported" if name in TASKS.imported else "built-in")
        for name, task in TASKS.items()
    ]
    return [*infos, *external_reasoning_gym.infos(), *external_verifiers.infos()]

"""Tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from earnest import plugins
from earnest.errors import nearest
from earnest.registry import Registry
from earnest.tasks.base import Task, TaskError, TaskInfo, UnknownTask

TASKS: Registry[Task] = Registry("task", "earnest.tasks", TaskError)

T = TypeVar("T", bound=Task | type[Task])


def register(task: T) -> T:
    """Register your own task by its ``name``: an instance, or a class without required arguments."""
    made = task() if isinstance(task, type) else task
    TASKS.add(made.name, made, own=False)
    return task


def get_task(name: str, settings: Mapping[str, Any] | None = None) -> Task:
    """The task of this name.

    A name is that of a registered task, ``reasoning_gym/<dataset>``, ``verifiers/<environment>``,
    ``openenv/<address>``, ``graded`` (the user's own rows with a grader), or a place in code: ``my_task.py:Name`` or
    ``package.module:Name``. ``settings`` are those of the dataset, the environment or the class; registered tasks and
    instances have none.
    """
    from earnest.tasks import external_openenv, external_reasoning_gym, external_verifiers, from_data

    given = dict(settings or {})
    environments = _environments()
    if name in TASKS or name in environments:
        if given:
            raise TaskError(f"task.{next(iter(given))}: the task {name} has no settings; leave it out.")
        return TASKS[name] if name in TASKS else environments[name]
    family, _, rest = name.partition("/")
    families = {"reasoning_gym": external_reasoning_gym, "verifiers": external_verifiers, "openenv": external_openenv}
    if family in families and rest:
        return families[family].load(rest, given)
    if name == from_data.NAME:
        return from_data.load(given)
    if ":" in name:
        return _from_code(name, given)
    if name.endswith(".py"):
        raise TaskError(f"task: {name} is a file; add the name of the task in it, as in {name}:MyTask.")
    patterns = ("my_task.py:Name", "reasoning_gym/<dataset>", "verifiers/<environment>", "openenv/<address>")
    known = [*TASKS, *environments, *patterns]
    raise UnknownTask(f"task {name!r} is unknown: {nearest(name, known)} `earnest tasks` lists all of them.")


def _environments() -> dict[str, Any]:
    from earnest.tasks.tool_tasks import ENVIRONMENTS

    return {environment.name: environment for environment in ENVIRONMENTS}


def _from_code(entry: str, settings: Mapping[str, Any]) -> Task:
    """The task at ``my_task.py:Name``: a class, which is made with the settings, or an instance."""
    found = plugins.find(entry, "task")
    if isinstance(found, type):
        try:
            found = found(**settings)
        except TypeError as error:
            raise TaskError(f"task: {entry} cannot be made with the settings {dict(settings)}: {error}.") from error
    elif settings:
        raise TaskError(f"task.{next(iter(settings))}: {entry} is an instance and has no settings; leave it out.")
    if inspect.isfunction(found):
        raise TaskError(
            f"task: {entry} is no task but a function: a recipe names it as the grader of its rows (`grade: {entry}` "
            "beside `data:`), and `earnest audit RECIPE.yaml` audits it there."
        )
    if not isinstance(found, Task):
        missing = [n for n in ("name", "description", "prompts", "grade") if not hasattr(found, n)]
        raise TaskError(
            f"task: {entry} is no task: it has no {' and no '.join(missing)}. A task has name, description, "
            "prompts(split, count, seed) and grade(prompt, completion)."
        )
    return found


def list_tasks() -> list[TaskInfo]:
    """Every registered task, and those of the installed extras."""
    from earnest.tasks import external_openenv, external_reasoning_gym, external_verifiers

    infos = [
        TaskInfo(name, task.description, "imported" if name in TASKS.imported else "built-in")
        for name, task in TASKS.items()
    ]
    infos += [TaskInfo(name, found.description, "environment") for name, found in _environments().items()]
    return [*infos, *external_reasoning_gym.infos(), *external_verifiers.infos(), *external_openenv.infos()]

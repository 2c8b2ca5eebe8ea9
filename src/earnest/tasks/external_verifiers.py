"""Any single-turn environment of ``verifiers`` as the task ``verifiers/<environment>`` (extra ``earnest[verifiers]``).

The name is that of an installed taskset package, as on verifiers' command line. earnest samples; verifiers' rewards
grade the finished conversation. Loading refuses what this cannot support, because verifiers would skip it without an
error: rewards that need a sandbox, tool servers, environments of several agents, a taskset
without any reward.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from earnest.errors import MissingExtra
from earnest.tasks.base import Extra, Grade, Prompt, Split, TaskError, TaskInfo, UnknownTask
from earnest.tasks.split import choose_distinct, stable_rng

_PREFIX = "verifiers/"
_MOST = 10_000
"""The largest number of tasks that is read from a taskset, which may be infinite."""


def installed() -> bool:
    return importlib.util.find_spec("verifiers") is not None and importlib.util.find_spec("verifiers.v1") is not None


@dataclass(frozen=True)
class Verifiers:
    """One taskset; the split is by the hash of the prompt."""

    environment: str
    tasks: dict[int, Any] = field(repr=False, compare=False)
    """verifiers' own tasks by their index in the taskset."""

    @property
    def name(self) -> str:
        return _PREFIX + self.environment

    @property
    def description(self) -> str:
        return f"verifiers' environment {self.environment}"

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        space = list(self.tasks.items())
        rng = stable_rng(self.name, split, seed)
        found = choose_distinct(space, lambda item: f"{self.name}|{item[1].data.prompt_text}", split, count, rng)
        return [self._prompt(index, task) for index, task in found]

    def _prompt(self, index: int, task: Any) -> Prompt:
        return Prompt(f"{self.name}:{index}", tuple(_messages(task.data)), {"index": index})

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        import verifiers.v1 as vf

        task = self.tasks[int(prompt.data["index"])]
        seed = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace: Any = vf.Trace(task=seed, state=_state(task), agent=vf.AgentInfo(config=vf.AgentConfig()))
        for message in prompt.messages:
            _append(trace, dict(message), sampled=False)
        _append(trace, {"role": "assistant", "content": completion}, sampled=True)
        _wait(task.score(trace))
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        correct = all(reward.score >= 1.0 for reward in rewards.values() if reward.weight > 0)
        extras: dict[str, Extra] = {name: float(reward.score) for name, reward in rewards.items()}
        extras.update({name: float(value) for name, value in trace.metrics.items() if value is not None})
        said = trace.info.get("feedback")
        named = ", ".join(f"{name} {reward.score:g}" for name, reward in rewards.items())
        return Grade(float(trace.reward), "" if correct else str(said or f"Not right: {named}."), correct, extras)


def _state(task: Any) -> Any:
    from verifiers.v1.state import state_cls

    return state_cls(type(task))()


def _append(trace: Any, message: dict[str, Any], *, sampled: bool) -> None:
    import verifiers.v1 as vf

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(vf.MessageNode.model_validate({"parent": parent, "message": message, "sampled": sampled}))


def _messages(data: Any) -> list[dict[str, Any]]:
    head = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*head, {"role": "user", "content": data.prompt}]
    return [*head, *(message.model_dump(exclude_none=True) for message in data.prompt)]


def _wait(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end; in another thread if this one already has a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _refusal(environment: str, tasks: list[Any], toolsets: list[Any]) -> str | None:
    """Why earnest cannot run this environment, or None."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import environment_class

    if environment_class(environment) is not vf.SingleAgentEnv:
        return "it runs agents of its own"
    if toolsets:
        return "it needs tool servers"
    task = tasks[0]
    if task.NEEDS_CONTAINER or type(task).setup is not vf.Task.setup or type(task).finalize is not vf.Task.finalize:
        return "it needs a sandbox"
    if type(task).toolsets(task.config):
        return "it needs tool servers"
    rewards = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    if not rewards:
        return "it has no reward, so every rollout would get 0"
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"its reward {getattr(reward, '__name__', reward)} needs a sandbox"
    if any(t.data.prompt is None for t in tasks):
        return "a simulated user opens its conversations"
    return None


def _is_there(environment: str) -> bool:
    """Whether a package of this name exists, without importing verifiers, which takes seconds."""
    module = environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    root = importlib.util.find_spec("verifiers")
    own = [Path(p) / "v1" / "tasksets" / module for p in (root.submodule_search_locations or ())] if root else []
    return module.isidentifier() and (any(p.is_dir() for p in own) or importlib.util.find_spec(module) is not None)


def load(environment: str, settings: Mapping[str, Any] | None = None) -> Verifiers:
    """The task of this installed environment with these settings of its taskset."""
    if not installed():
        raise MissingExtra("verifiers", "verifiers", "a task verifiers/<environment>")
    if not _is_there(environment):
        raise UnknownTask(f"verifiers finds no environment {environment!r}: install its package first.")
    from verifiers.v1.utils.loaders import load_taskset, taskset_class, taskset_config_type

    try:
        kind = taskset_class(environment)
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise UnknownTask(f"{environment!r} is not an environment of verifiers: {error}") from error
    try:
        config = taskset_config_type(environment)(id=environment, **(settings or {}))
    except ValueError as error:  # raised by pydantic
        raise TaskError(f"task: the environment {environment!r} refuses its settings: {error}") from None
    taskset = load_taskset(config)
    tasks = list(itertools.islice(taskset, _MOST))
    if not tasks:
        raise TaskError(f"the environment {environment!r} has no tasks; check its settings.")
    refusal = _refusal(environment, tasks, kind.toolsets(config))
    if refusal:
        raise TaskError(
            f"the environment {environment!r} cannot be a task of earnest: {refusal}. Run it with verifiers itself."
        )
    return Verifiers(environment, {task.data.idx: task for task in tasks})


def infos() -> list[TaskInfo]:
    """One line: the environments are the installed packages."""
    hint = "an installed environment of verifiers" if installed() else 'pip install "earnest[verifiers]"'
    return [TaskInfo(_PREFIX + "<environment>", hint, "verifiers", available=installed())]

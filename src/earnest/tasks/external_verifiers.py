"""Environments of ``verifiers`` as the task ``verifiers/<environment>`` (extra ``earnest[verifiers]``).

The name is that of an installed taskset package, as on verifiers' command line. earnest samples; verifiers' rewards
grade the finished conversation. A taskset alone is a task of one turn; one with tools, or with an environment class
that talks to one agent, is an environment of several turns (``verifiers_environment.py``). Loading refuses what this
cannot support, because verifiers would skip it without an error: hooks and rewards that need a sandbox, environments of
several agents, a taskset without any reward.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from earnest.errors import MissingExtra
from earnest.tasks.base import Extra, Grade, Prompt, Split, TaskError, TaskInfo, UnknownTask
from earnest.tasks.playing import run_to_end
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
        found = choose_distinct(space, lambda item: f"{self.name}|{_question(item[1].data)}", split, count, rng)
        return [self._prompt(index, task) for index, task in found]

    def _prompt(self, index: int, task: Any) -> Prompt:
        return Prompt(f"{self.name}:{index}", tuple(messages_of(task.data)), {"index": index})

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        task = self.tasks[int(prompt.data["index"])]
        trace = new_trace(task)
        for message in prompt.messages:
            append(trace, dict(message), sampled=False)
        append(trace, {"role": "assistant", "content": completion}, sampled=True)
        run_to_end(task.score(trace))
        return grade_of(trace)


def grade_of(trace: Any) -> Grade:
    """The grade of a scored trace: correct where every reward of positive weight is at least 1."""
    rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    correct = all(reward.score >= 1.0 for reward in rewards.values() if reward.weight > 0)
    extras: dict[str, Extra] = {name: float(reward.score) for name, reward in rewards.items()}
    extras.update({name: float(value) for name, value in trace.metrics.items() if value is not None})
    said = trace.info.get("feedback")
    named = ", ".join(f"{name} {reward.score:g}" for name, reward in rewards.items())
    return Grade(float(trace.reward), "" if correct else str(said or f"Not right: {named}."), correct, extras)


def new_trace(task: Any) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    seed = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return vf.Trace(task=seed, state=state_cls(type(task))(), agent=vf.AgentInfo(config=vf.AgentConfig()))


def append(trace: Any, message: dict[str, Any], *, sampled: bool) -> None:
    import verifiers.v1 as vf

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(vf.MessageNode.model_validate({"parent": parent, "message": message, "sampled": sampled}))


def _question(data: Any) -> str:
    """What makes two tasks the same question: the prompt, or all data where the conversation has no fixed opening."""
    return str(data.prompt_text if data.prompt is not None else data.model_dump_json(exclude={"idx"}))


def messages_of(data: Any) -> list[dict[str, Any]]:
    """The messages that open a conversation; none where its user opens it."""
    head = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None:
        return head
    if isinstance(data.prompt, str):
        return [*head, {"role": "user", "content": data.prompt}]
    return [*head, *(message.model_dump(exclude_none=True) for message in data.prompt)]


def _refusal(kind: Any, seats: Sequence[str], task: Any) -> str | None:
    """Why earnest cannot run this environment, or None. ``kind`` is its class of Env, ``seats`` the names of agents."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.decorators import discover_decorated

    if len(seats) != 1:
        return f"it runs several agents ({', '.join(seats)})"
    if any(getattr(kind, hook) is not getattr(vf.Env, hook) for hook in ("finalize", "start", "stop")):
        return "its environment class has hooks around an episode"
    if task.NEEDS_CONTAINER or type(task).setup is not vf.Task.setup or type(task).finalize is not vf.Task.finalize:
        return "it needs a sandbox"
    if discover_decorated(task, "intercept"):
        return "it intercepts requests to the model"
    if kind is vf.SingleAgentEnv and task.data.prompt is None:
        return "a simulated user opens its conversations"
    rewards = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    if not rewards:
        return "it has no reward, so every rollout would get 0"
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"its reward {getattr(reward, '__name__', reward)} needs a sandbox"
    return None


def _is_there(environment: str) -> bool:
    """Whether a package of this name exists, without importing verifiers, which takes seconds."""
    module = environment.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    root = importlib.util.find_spec("verifiers")
    own = [Path(p) / "v1" / "tasksets" / module for p in (root.submodule_search_locations or ())] if root else []
    return module.isidentifier() and (any(p.is_dir() for p in own) or importlib.util.find_spec(module) is not None)


def load(environment: str, settings: Mapping[str, Any] | None = None) -> Any:
    """This environment with these settings of its taskset: a ``Verifiers``, or a ``VerifiersEnvironment``."""
    if not installed():
        raise MissingExtra("verifiers", "verifiers", "a task verifiers/<environment>")
    if not _is_there(environment):
        raise UnknownTask(f"verifiers finds no environment {environment!r}: install its package first.")
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        env_config_type,
        environment_class,
        load_taskset,
        taskset_class,
        taskset_config_type,
    )

    try:
        kind = taskset_class(environment)
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise UnknownTask(f"{environment!r} is not an environment of verifiers: {error}") from error
    try:
        config = taskset_config_type(environment)(id=environment, **(settings or {}))
    except ValueError as error:  # raised by pydantic
        raise TaskError(f"task: the environment {environment!r} refuses its settings: {error}") from None
    tasks = list(itertools.islice(load_taskset(config), _MOST))
    if not tasks:
        raise TaskError(f"the environment {environment!r} has no tasks; check its settings.")
    driver, env_config = environment_class(environment), env_config_type(environment)(taskset=config)
    refusal = _refusal(driver, list(agent_config_fields(env_config)), tasks[0])
    if refusal:
        raise TaskError(
            f"the environment {environment!r} cannot be a task of earnest: {refusal}. Run it with verifiers itself."
        )
    single = Verifiers(environment, {task.data.idx: task for task in tasks})

    def toolsets(task: Any) -> list[Any]:
        return [*kind.toolsets(config), *type(task).toolsets(task.config)]

    if driver is vf.SingleAgentEnv and not toolsets(tasks[0]):
        return single
    from earnest.tasks.verifiers_environment import VerifiersEnvironment

    return VerifiersEnvironment(single, driver(env_config).run, toolsets)


def infos() -> list[TaskInfo]:
    """One line: the environments are the installed packages."""
    hint = "an installed environment of verifiers" if installed() else 'pip install "earnest[verifiers]"'
    return [TaskInfo(_PREFIX + "<environment>", hint, "verifiers", available=installed())]

"""Checks of a run before its folder is made, so that a mistake leaves no folder."""

from __future__ import annotations

from itertools import groupby

from earnest.errors import ConfigError
from earnest.models.tool_calls import check_tools
from earnest.rollouts import Row, TurnSettings, demonstration
from earnest.runs.collect import BatchSource
from earnest.runs.evaluate import heldout
from earnest.runs.loggers import require_installed
from earnest.runs.setup import Setup
from earnest.tasks import is_environment

PROMPTS = 256
"""The number of training prompts that are rendered and measured, at most."""


def preflight(setup: Setup) -> None:
    """Render the held-out and the first training prompts, hold them against the context, look for their answers where
    the objective demonstrates them, and for the loggers' packages; fit the schedule into the run."""
    config, policy, task = setup.config, setup.policy, setup.task
    require_installed(config.loggers)
    setup.engine.plan(1, config.updates)  # raises where the schedule does not fit into the run
    for one in (task, *setup.further):
        if is_environment(one) and setup.mesh.tensor > 1:
            raise ConfigError(
                f"engine.tensor: the order in which turns of {one.name} are sampled differs between ranks, and the "
                "ranks of a team sample together; set engine.tensor=1."
            )
        if is_environment(one) and one.tools:
            check_tools(policy)
    if is_environment(task) and setup.samplers is not None and setup.samplers.partial != "finish":
        raise ConfigError(
            f"sampler.partial: conversations of several turns ({setup.name}) end under the weights with which they "
            "began; leave it out."
        )
    if config.turns != TurnSettings() and not any(is_environment(one) for one in (task, *setup.further)):
        raise ConfigError(f"turns: {setup.name} has one turn; leave turns out, or use an environment as task.")
    stream = BatchSource(setup).stream  # the user's rows were read and checked when they were loaded
    training = [] if stream is None else stream.next(min(PROMPTS, config.steps * config.sampling.prompts_per_step))
    context = policy.positions
    longest = config.sampling.max_new_tokens
    tasks = [one for one in (task, *setup.further) if one is not None]
    evaluated = [(one, prompt) for one in tasks for prompt in heldout(setup, one)]
    for one, prompt in [*evaluated, *((task, prompt) for prompt in training)]:
        tools = one.tools if is_environment(one) else None
        length = len(policy.render(prompt.messages, tools=tools or None))
        if context is None or length + longest - 1 <= context:
            continue
        if length >= context:
            raise ConfigError(
                f"task: prompt {prompt.id} has {length} tokens, and the context of {policy.name} holds {context}; use "
                "a task with shorter prompts, or a model with a longer context."
            )
        raise ConfigError(
            f"sampling.max_new_tokens: {longest} tokens after the {length} of prompt {prompt.id} exceed the context of "
            f"{policy.name} ({context} tokens); set at most {context - length + 1}."
        )
    given = frozenset() if setup.data is None else setup.data.roles
    if task is not None and "demonstration" in setup.objective.wants().roles - given:
        for prompt in training[: config.sampling.prompts_per_step]:
            turn = _longest_turn(demonstration(policy, task, prompt, 0, 0))
            if is_environment(task) and turn > longest:
                raise ConfigError(
                    f"sampling.max_new_tokens: a turn of the oracle of {task.name} has {turn} tokens (prompt "
                    f"{prompt.id}), and the policy may sample {longest}, so it could never finish such a turn; set at "
                    f"least {turn}."
                )


def _longest_turn(row: Row) -> int:
    """The number of tokens of the longest turn of a demonstration: what it reads has weight 0."""
    weights = row.weights or (1.0,) * len(row.tokens)
    return max(len(list(turn)) if weight else 0 for weight, turn in groupby(weights))

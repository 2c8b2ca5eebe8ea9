"""Conversations of an environment with a policy that is a Python function: for demonstrations and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from earnest.tasks.base import Grade, Prompt, TaskError
from earnest.tasks.environment import Ending, Environment, Message

T = TypeVar("T")
MessagePolicy = Callable[[Prompt, tuple[Message, ...]], Message]
"""The next assistant message, from the prompt and the messages so far."""


async def play(
    environment: Environment, prompt: Prompt, policy: MessagePolicy, seed: int = 0, max_turns: int = 8
) -> tuple[list[Message], Grade]:
    """(messages, grade) of one conversation."""
    opening = await environment.reset(prompt, seed)
    messages: list[Message] = list(opening.messages)
    ending: Ending = "turn_limit"
    turned = 0.0
    for _ in range(max_turns):
        message = policy(prompt, tuple(messages))
        step = await environment.step(opening.state, message)
        messages += [message, *step.messages]
        turned += step.reward
        if step.done:
            ending = step.ending
            break
    grade = await environment.grade(opening.state, ending)
    return messages, replace(grade, reward=grade.reward + turned)


async def demonstration(environment: Environment, prompt: Prompt, policy: MessagePolicy) -> dict[str, Any]:
    """A row of messages and tools to learn from; raises if the policy does not solve the prompt."""
    messages, grade = await play(environment, prompt, policy)
    if not grade.correct:
        raise TaskError(
            f"the policy that should demonstrate {environment.name} fails on {prompt.id}: {grade.feedback or grade}"
        )
    return {"messages": messages, "tools": list(environment.tools)}


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; in another thread if this one already has a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()

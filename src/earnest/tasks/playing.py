"""Conversations of an environment with a policy that is a Python function: for demonstrations and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from earnest.tasks.base import Grade, Prompt, TaskError
from earnest.tasks.environment import Ending, Environment, Message

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
    return messages, Grade(grade.reward + turned, grade.feedback, grade.correct, grade.extras)


async def demonstration(environment: Environment, prompt: Prompt, policy: MessagePolicy) -> dict[str, Any]:
    """A row of messages and tools to learn from; raises if the policy does not solve the prompt."""
    messages, grade = await play(environment, prompt, policy)
    if not grade.correct:
        raise TaskError(
            f"the policy that should demonstrate {environment.name} fails on {prompt.id}: {grade.feedback or grade}"
        )
    return {"messages": messages, "tools": list(environment.tools)}

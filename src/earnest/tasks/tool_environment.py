"""A task with tools: the policy calls tools until it answers, and the task grades the answer.

    ToolEnvironment(MyTask(), [search, open_page])

The task gives prompts and grades the text of the answer, as without tools. A tool's hidden parameter ``_table`` is the
prompt's ``data["table"]``. A malformed call, an unknown tool, wrong arguments and a tool that raises are observations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from earnest.tasks.base import Extra, Grade, Prompt, Task, TaskError
from earnest.tasks.environment import Ending, Message, Opening, StepResult
from earnest.tasks.playing import MessagePolicy
from earnest.tasks.tools import Observation, Tools


@dataclass
class Conversation:
    """The state of one conversation: its prompt, the calls so far, and the answer that ended it. ``failures``: (turn,
    observation) of every call that failed, turns counted from 0."""

    prompt: Prompt
    turns: int = 0
    calls: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    answer: str | None = None


class ToolEnvironment:
    """An environment of a task and Python functions. needs_call: an answer before any successful call is wrong,
    whatever it is. oracle: a policy that solves every prompt, for demonstrations."""

    def __init__(
        self,
        task: Task,
        functions: Sequence[Callable[..., Any]],
        *,
        tools: Tools | None = None,
        needs_call: bool = False,
        oracle: MessagePolicy | None = None,
    ) -> None:
        self.task, self.needs_call, self.oracle = task, needs_call, oracle
        self.name, self.description, self.prompts = task.name, task.description, task.prompts
        self.toolbox = tools or Tools(functions)
        if not self.toolbox.functions:
            raise TaskError(f"the environment {task.name} has no tools; give at least one function.")

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.toolbox.schemas

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        return Opening(prompt.messages, Conversation(prompt))

    async def call(self, state: Conversation, name: str, arguments: Mapping[str, Any]) -> Observation:
        return await asyncio.to_thread(self.toolbox.call, name, arguments, state.prompt.data)

    async def step(self, state: Conversation, message: Message) -> StepResult:
        turn, state.turns = state.turns, state.turns + 1
        calls, errors = message.get("tool_calls") or (), message.get("tool_call_errors") or ()
        if not calls and not errors:
            state.answer = str(message.get("content") or "")
            return StepResult(done=True)
        replies: list[Message] = []
        for number, call in enumerate(calls):
            function = call["function"]
            seen = await self.call(state, function["name"], function["arguments"])
            state.calls += not seen.failed
            if seen.failed:
                state.failures.append((turn, seen.text))
            replies.append(tool_message(call.get("id", f"call_{number}"), function["name"], seen.text))
        for number, text in enumerate(errors, len(calls)):
            state.failures.append((turn, text))
            replies.append(tool_message(f"call_{number}", "", text))
        return StepResult(tuple(replies))

    async def grade(self, state: Conversation, ending: Ending) -> Grade:
        extras: dict[str, Extra] = {"tool_calls": float(state.calls), "failed_calls": float(len(state.failures))}
        if self.needs_call and state.answer is not None and not state.calls and not state.failures:
            wanted = f"Use {' or '.join(self.toolbox.by_name)} before you answer."
            return Grade(0.0, wanted, False, extras, turn=state.turns - 1)
        if state.answer is None:
            found = Grade(0.0, "You gave no answer.", False, turn=state.turns - 1)
        elif self.needs_call and not state.calls:
            found = Grade(0.0, "No call succeeded.", False, turn=state.turns - 1)
        else:
            found = await asyncio.to_thread(self.task.grade, state.prompt, state.answer)
            found = replace(found, turn=None if found.correct else state.turns - 1)
        if not found.correct and state.failures:  # the first call that failed, rather than what followed from it
            turn, seen = state.failures[0]
            found = replace(found, feedback=seen, turn=turn)
        return replace(found, extras={**found.extras, **extras})


def tool_message(call_id: str, name: str, text: str) -> Message:
    """The message with the result of a call; ``name`` is left out where no tool was named."""
    return {"role": "tool", "tool_call_id": call_id, **({"name": name} if name else {}), "content": text}

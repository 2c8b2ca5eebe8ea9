"""An environment of ``verifiers`` with several turns: with tools, with a user who is code, or both.

verifiers' own code drives the conversation: its ``run`` calls ``agents.NAME.run(task)`` or opens an interaction and
calls ``turn(message)``. The agent here is a stand-in, whose model is the policy that earnest samples: where the agent
needs a reply, the conversation waits for the next message of the policy. Tools run in this process, as functions of the
environment's own package, with the schemas of verifiers' MCP server.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from earnest.tasks.base import Grade, Prompt, TaskError
from earnest.tasks.environment import Ending, Message, Opening, StepResult
from earnest.tasks.external_verifiers import Verifiers, append, grade_of, messages_of, new_trace
from earnest.tasks.playing import run_to_end
from earnest.tasks.tool_environment import tool_message
from earnest.tasks.tools import Observation

_log = logging.getLogger(__name__)


@dataclass
class _Talk:
    """The state of one conversation. ``events``: a list of new messages where the policy must reply, or the exception
    (or None) that ended the run."""

    task: Any
    trace: Any
    events: asyncio.Queue[list[Message] | BaseException | None] = field(default_factory=asyncio.Queue)
    reply: asyncio.Future[Message] | None = None
    running: asyncio.Task[None] | None = None
    opened: bool = False
    scored: bool = False

    async def ask(self, new: list[Message]) -> Message:
        self.reply = asyncio.get_running_loop().create_future()
        self.events.put_nowait(new)
        return await self.reply

    async def score(self) -> None:
        if not self.scored:
            self.scored = True
            await self.task.score(self.trace)


class VerifiersEnvironment:
    """One environment of verifiers as an environment of earnest."""

    def __init__(self, single: Verifiers, run: Any, toolsets: Any) -> None:
        """``run(task, agents)`` is the environment's; ``toolsets()`` makes fresh tool sets."""
        self.single, self._run, self._toolsets = single, run, toolsets
        self.name, self.description, self.prompts = single.name, single.description, single.prompts

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return _Toolbox(self._toolsets(next(iter(self.single.tasks.values())))).schemas()

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        task = self.single.tasks[int(prompt.data["index"])]
        talk = _Talk(task, new_trace(task))
        talk.running = asyncio.create_task(self._drive(talk))
        first = await talk.events.get()
        if not isinstance(first, list):
            raise TaskError(f"the environment {self.name} ended before the policy's first turn: {first!r}") from first
        return Opening(tuple(first), talk)

    async def _drive(self, talk: _Talk) -> None:
        error: BaseException | None = None
        try:
            await self._run(talk.task, _Agents(self, talk))
        except Exception as raised:  # an environment is foreign code: its error ends this conversation only
            _log.warning("the environment %s raised %r", self.name, raised)
            error = raised
        talk.events.put_nowait(error)

    async def step(self, state: _Talk, message: Message) -> StepResult:
        assert state.reply is not None
        state.reply.set_result(message)
        event = await state.events.get()
        if isinstance(event, list):
            return StepResult(tuple(event))
        return StepResult(done=True, ending="answered" if event is None else "tool_failure")

    async def grade(self, state: _Talk, ending: Ending) -> Grade:
        assert state.running is not None
        if not state.running.done():
            state.running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await state.running
        if ending == "tool_failure":
            return Grade(0.0, "", False, {"error": "the environment raised"})
        await state.score()
        return grade_of(state.trace)


class _Agents(SimpleNamespace):
    """``agents.NAME`` of verifiers' ``run``: one stand-in, whatever its name."""

    def __init__(self, environment: VerifiersEnvironment, talk: _Talk) -> None:
        super().__init__()
        self._agent = _Agent(environment, talk)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._agent


class _Agent:
    """Stands in for verifiers' agent: its replies come from the policy."""

    trainable = True

    def __init__(self, environment: VerifiersEnvironment, talk: _Talk) -> None:
        self._environment, self._talk = environment, talk

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return self._talk.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        if self._talk.opened:
            raise TaskError(
                f"the environment {self._environment.name} starts a second conversation in one episode, and a rollout "
                "has one; run it with verifiers itself."
            )
        self._talk.opened = True
        self._talk.task = task
        box = _Toolbox(self._environment._toolsets(task))
        await box.open(task, self._talk.trace)
        yield _Interaction(self._talk, box)
        await self._talk.score()


class _Interaction:
    """A conversation that the environment's code continues turn by turn."""

    def __init__(self, talk: _Talk, box: _Toolbox) -> None:
        self._talk, self._box, self._over, self._begun = talk, box, False, False

    @property
    def trace(self) -> Any:
        return self._talk.trace

    async def turn(self, message: str | None = None) -> Any:
        """One user message; the replies of the policy and of its tools, until it answers without a call."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import AssistantMessage, ToolMessage

        if self._over:
            return Segment(messages=[], terminated=True)
        new: list[Message] = [] if self._begun else list(messages_of(self._talk.task.data))
        self._begun = True
        if message is not None:
            new.append({"role": "user", "content": message})
        produced: list[Any] = []
        while True:
            for item in new:
                append(self.trace, dict(item), sampled=False)
            reply = await self._talk.ask(new)
            wired = _to_verifiers(reply)
            append(self.trace, wired, sampled=True)
            produced.append(AssistantMessage.model_validate(wired))
            if await self._stops():
                self._over = True
                break
            new = await self._box.replies(reply)
            if not new:
                break
            produced += [ToolMessage.model_validate(item) for item in new]
        return Segment(messages=produced, root_reply=str(reply.get("content") or ""))

    async def _stops(self) -> bool:
        for hook in self._talk.task.hooks("stop"):
            found = hook(self._talk.trace)
            if await found if inspect.isawaitable(found) else found:
                self._talk.trace.stop(hook.__name__)
                return True
        return False


class _Toolbox:
    """The tools of one conversation, registered with an MCP server in this process."""

    def __init__(self, toolsets: Sequence[Any]) -> None:
        from mcp.server.mcpserver import MCPServer
        from verifiers.v1.utils.decorators import discover_decorated

        self.sets, self.server, self.names = list(toolsets), MCPServer("earnest"), set[str]()
        for toolset in self.sets:
            for function in discover_decorated(toolset, "tool"):
                own = getattr(function, "tool_name", None) or function.__name__
                name = f"{toolset.server_name}_{own}" if toolset.server_name else own
                self.names.add(name)
                self.server.add_tool(function, name=name, description=(function.__doc__ or "").strip() or None)

    async def open(self, task: Any, trace: Any) -> None:
        for toolset in self.sets:
            toolset._inert_state = trace.state  # what `toolset.state` reads outside of a server
            await toolset.setup()
            await toolset.setup_task(task)

    def schemas(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for tool in run_to_end(self.server.list_tools()):
            schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
            parameters = dict(schema or {"type": "object", "properties": {}})
            function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
            found.append({"type": "function", "function": function})
        return found

    async def replies(self, message: Message) -> list[Message]:
        """The tool messages for the calls of a message; empty without calls."""
        found: list[Message] = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            seen = await self._call(function["name"], function["arguments"])
            found.append(tool_message(call.get("id") or f"call{number:05d}", function["name"], seen.text))
        for number, text in enumerate(message.get("tool_call_errors") or (), len(found)):
            found.append(tool_message(f"call{number:05d}", "", text))
        return found

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            return Observation(f"Error: there is no tool {name!r}; the tools are {known}.", failed=True)
        try:
            result: Any = await self.server.call_tool(name, dict(arguments))
        except Exception as error:  # a tool is foreign code; what it raises is an observation
            return Observation(f"Error: {' '.join(str(error).split())[:400]}", failed=True)
        # the form of an MCP result depends on the version of the library
        parts = result[0] if isinstance(result, tuple) else getattr(result, "content", result)
        return Observation("\n".join(str(getattr(part, "text", part)) for part in parts))


def _to_verifiers(message: Message) -> dict[str, Any]:
    """The policy's message in verifiers' form."""
    calls = [
        {
            "id": c.get("id") or f"call{i:05d}",
            "name": c["function"]["name"],
            "arguments": json.dumps(c["function"]["arguments"]),
        }
        for i, c in enumerate(message.get("tool_calls") or ())
    ]
    kept = {k: message[k] for k in ("content", "reasoning_content") if message.get(k) is not None}
    return {"role": "assistant", **kept, **({"tool_calls": calls} if calls else {})}

"""Environments of OpenEnv as the task ``openenv/<address>`` (extra ``earnest[openenv]``).

    task: openenv/http://localhost:8000

An OpenEnv environment is a server. A conversation is one session of it, over a WebSocket: ``reset`` with the prompt's
seed opens an episode, and every message of the policy is an action. What a message becomes depends on the action:

    an environment of MCP tools          each tool call is the action ``call_tool``
    an action with one required text     the text of the message
    any other action                     each call of the tool ``act``, whose parameters are the action's fields

Where there are tools, a message without a call ends the episode. The rewards are those of the server's steps. An action
that the server refuses as invalid is an observation; any other error of the server ends the conversation.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from earnest.errors import EarnestError, MissingExtra
from earnest.settings import Checked, FieldProblem, make, setting
from earnest.tasks.base import Grade, Prompt, Split, TaskError, TaskInfo
from earnest.tasks.environment import Ending, Message, Opening, StepResult
from earnest.tasks.playing import run_to_end
from earnest.tasks.split import choose_distinct, stable_rng
from earnest.tasks.tool_environment import tool_message

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_PREFIX = "openenv/"
_SEEDS = range(10_000)
_MCP = ("Action", "CallToolAction", "ListToolsAction")
"""The titles of action schemas that stand for MCP tools."""
_LARGEST = 64 * 2**20
"""Bytes of a message of the server."""


def installed() -> bool:
    return importlib.util.find_spec("websockets") is not None


@dataclass(frozen=True, kw_only=True)
class OpenEnvSettings(Checked):
    """The settings of the task."""

    error: ClassVar[type[EarnestError]] = TaskError

    prompt: str | None = setting(None, "a text that the policy reads first; none: the server's first observation alone")
    solved: float = setting(1.0, "the sum of an episode's rewards from which it counts as correct")


class OpenEnvError(TaskError):
    """The server answered with an error."""

    def __init__(self, url: str, data: Mapping[str, Any]) -> None:
        self.invalid = data.get("code") == "VALIDATION_ERROR"
        parts = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in data.get("errors") or ()]
        self.reason = "; ".join(parts) or str(data.get("message"))
        hint = ""
        if data.get("code") == "CAPACITY_REACHED":
            hint = " Start the server with max_concurrent_envs of at least the number of conversations in a step."
        super().__init__(f"the OpenEnv server at {url} answered: {self.reason}.{hint}")


class OpenEnvSession:
    """One episode at the server."""

    def __init__(self, url: str, socket: ClientConnection) -> None:
        self.url, self.socket = url, socket

    @classmethod
    async def open(cls, url: str) -> OpenEnvSession:
        from websockets.asyncio.client import connect

        return cls(url, await connect(f"ws{url.removeprefix('http')}/ws", max_size=_LARGEST))

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the server's answer to a message of this kind."""
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # its reason is still to be received
            await self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self.socket.recv())
        if answer.get("type") == "error":
            raise OpenEnvError(self.url, answer.get("data") or {})
        return answer.get("data") or {}

    async def close(self) -> None:
        await self.socket.close()


@dataclass
class OpenEnvEpisode:
    """The state of one conversation. ``failures``: (turn, observation) of every action that failed."""

    session: OpenEnvSession
    turns: int = 0
    reward: float = 0.0
    done: bool = False
    last: str = ""
    failures: list[tuple[int, str]] = field(default_factory=list)


class OpenEnv:
    """The environment of one server. ``text`` is the field of the action that takes the policy's text; None: tools."""

    def __init__(
        self, url: str, settings: OpenEnvSettings, text: str | None, tools: Sequence[Mapping[str, Any]], mcp: bool
    ) -> None:
        self.url, self.settings, self.text, self.tools, self._mcp = url, settings, text, tools, mcp

    @property
    def name(self) -> str:
        return _PREFIX + self.url

    @property
    def description(self) -> str:
        return f"OpenEnv's environment at {self.url}"

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        """An episode is a seed of the server; its messages come from the server when the conversation starts."""
        rng = stable_rng(self.name, split, seed)
        found = choose_distinct(_SEEDS, lambda number: f"openenv|{number}", split, count, rng)
        return [Prompt(f"{self.name}:{number}", (), {"seed": number}) for number in found]

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        session = await OpenEnvSession.open(self.url)
        try:
            seen = observed(await session.ask("reset", {"seed": int(prompt.data["seed"])}))
        except BaseException:
            await session.close()
            raise
        texts = [text for text in (self.settings.prompt, seen) if text]
        if not texts:
            await session.close()
            raise TaskError(f"task.prompt: is required, because {self.url} starts an episode without a text.")
        roles = ("system", "user")[-len(texts) :]
        messages = tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=True))
        return Opening(messages, OpenEnvEpisode(session))

    async def step(self, state: OpenEnvEpisode, message: Message) -> StepResult:
        before, turn, state.turns = state.reward, state.turns, state.turns + 1
        if self.text is not None:
            seen = await self._act(state, turn, {self.text: str(message.get("content") or "")})
            replies: list[Message] = [{"role": "user", "content": seen}]
            return StepResult(tuple(replies), state.done, state.reward - before)
        calls, errors = message.get("tool_calls") or (), message.get("tool_call_errors") or ()
        replies = []
        for number, call in enumerate(calls):
            function = call["function"]
            seen = await self._call(state, turn, function["name"], function["arguments"])
            replies.append(tool_message(call.get("id", f"call_{number}"), function["name"], seen))
            if state.done:
                break
        for number, text in enumerate(errors, len(calls)):
            state.failures.append((turn, text))
            replies.append(tool_message(f"call_{number}", "", text))
        return StepResult(tuple(replies), state.done or not replies, state.reward - before)

    async def _call(self, state: OpenEnvEpisode, turn: int, name: str, arguments: Mapping[str, Any]) -> str:
        known = [tool["function"]["name"] for tool in self.tools]
        if name not in known:
            text = f"Error: there is no tool {name!r}; the tools are {', '.join(known)}."
            state.failures.append((turn, text))
            return text
        mcp = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        return await self._act(state, turn, mcp if self._mcp else arguments)

    async def _act(self, state: OpenEnvEpisode, turn: int, action: Mapping[str, Any]) -> str:
        """The observation after an action, as a text."""
        try:
            answer = await state.session.ask("step", action)
        except OpenEnvError as error:
            if not error.invalid:
                raise
            answer = {"observation": {"error": {"message": error.reason}}}
        state.reward += float(answer.get("reward") or 0.0)
        state.done = bool(answer.get("done"))
        state.last = observed(answer)
        if state.last.startswith("Error: "):
            state.failures.append((turn, state.last))
        return state.last

    async def grade(self, state: OpenEnvEpisode, ending: Ending) -> Grade:
        await state.session.close()
        if state.reward >= self.settings.solved:
            return Grade(0.0, "", True)
        turn, seen = state.failures[0] if state.failures else (None, state.last)
        return Grade(0.0, seen or "You gave no answer.", False, turn=turn)


def observed(answer: Mapping[str, Any]) -> str:
    """The text of an observation: its only field, or all of them as JSON; of a tool call the result or the error."""
    found = {key: value for key, value in (answer.get("observation") or {}).items() if value is not None}
    if isinstance(found.get("error"), Mapping):
        return f"Error: {found['error'].get('message')}"
    if found.pop("tool_name", None) is not None:
        return _plain(found.get("result"))
    return _plain(next(iter(found.values()))) if len(found) == 1 else json.dumps(found) if found else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping) and value.get("data") is not None:  # what an MCP tool returned
        return _plain(value["data"])
    if isinstance(value, Mapping) and isinstance(value.get("content"), list):
        return "\n".join(str(part.get("text", part)) for part in value["content"])
    return value if isinstance(value, str) else json.dumps(value)


def _schema(name: str, about: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {key: parameters[key] for key in ("properties", "required", "$defs") if parameters.get(key)}
    parameters = {"type": "object", "properties": {}} | wanted
    return {"type": "function", "function": {"name": name, "description": about.strip(), "parameters": parameters}}


async def _tools(url: str) -> list[Mapping[str, Any]]:
    """The schemas of the server's MCP tools."""
    session = await OpenEnvSession.open(url)
    try:
        answer = await session.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
    finally:
        await session.close()
    if "error" in answer:
        raise TaskError(f"the OpenEnv server at {url} lists no tools: {answer['error'].get('message')}.")
    return [
        _schema(tool["name"], tool.get("description") or "", tool.get("input_schema") or tool.get("inputSchema") or {})
        for tool in answer["result"]["tools"]
    ]


def load(address: str, settings: Mapping[str, Any] | None = None) -> Any:
    if not installed():
        raise MissingExtra("websockets", "openenv", "a task openenv/<address>")
    import httpx

    try:
        made = make(OpenEnvSettings, settings or {})
    except FieldProblem as problem:
        raise TaskError(f"task.{problem}") from None
    url = address.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise TaskError(f"task: {_PREFIX}{address} has no address of a server; write openenv/http://localhost:8000.")
    try:
        answer = httpx.get(f"{url}/schema", timeout=30)
        answer.raise_for_status()
        action = answer.json()["action"]
        if action.get("title") in _MCP:
            return OpenEnv(url, made, None, run_to_end(_tools(url)), True)
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, EarnestError):
            raise
        raise TaskError(f"task: there is no OpenEnv server at {url} ({error}); start it first.") from None
    fields = {name: spec for name, spec in action.get("properties", {}).items() if name != "metadata"}
    required = [name for name in action.get("required", ()) if name != "metadata"]
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return OpenEnv(url, made, required[0], (), False)
    act = _schema("act", action.get("description") or "Act in the environment.", {**action, "properties": fields})
    return OpenEnv(url, made, None, [act], False)


def infos() -> list[TaskInfo]:
    """One line: the environments are servers."""
    hint = "an OpenEnv server, such as http://localhost:8000" if installed() else 'pip install "earnest[openenv]"'
    return [TaskInfo(_PREFIX + "<address>", hint, "openenv", available=installed())]

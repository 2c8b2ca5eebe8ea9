"""Agent traces: OpenAI-style messages with tool calls, one trace per line of JSON.

    {"id": "a1", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}

A line may also carry ``tools``, ``reward``, ``feedback`` and ``meta``; what `earnest serve` exports has
``completion_id``, ``model`` and ``version`` as well. ``logs.py`` converts other formats. A *turn* is a message of the
assistant: its state is every message before it, and the user's next message is its hindsight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from earnest.replay.errors import TraceError
from earnest.replay.logs import as_trace

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
READ = frozenset({"id", "completion_id", "messages", "tools", "reward", "feedback", "model", "version", "meta"})


@dataclass(frozen=True)
class Trace:
    """One conversation. ``unread`` are keys of the line that are not read."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    reward: float | None = None
    feedback: str | None = None
    completion_id: str | None = None
    model: str | None = None
    version: int | str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def turns(self) -> list[AssistantTurn]:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [AssistantTurn(self, number, place, place == places[-1]) for number, place in enumerate(places)]


@dataclass(frozen=True)
class AssistantTurn:
    """The assistant's message number ``number`` in a trace: ``messages[place]``."""

    trace: Trace
    number: int
    place: int
    last: bool

    @property
    def state(self) -> tuple[Message, ...]:
        return self.trace.messages[: self.place]

    @property
    def answer(self) -> Message:
        return self.trace.messages[self.place]

    @property
    def next_message(self) -> str | None:
        """The user's next message; after the last turn the feedback on the trace. None: there is neither."""
        for message in self.trace.messages[self.place + 1 :]:
            if message["role"] == "user":
                return str(message["content"])
        return self.trace.feedback or None

    @property
    def results(self) -> str | None:
        """What the tools returned to this turn's calls. None: it calls none, or the trace ends with the calls."""
        found = []
        for message in self.trace.messages[self.place + 1 :]:
            if message["role"] != "tool":
                break
            found.append(str(message["content"]))
        return "\n".join(found) or None

    @property
    def key(self) -> str:
        return f"{self.trace.id}#{self.number}"


def plain_text(message: Message) -> str:
    """A message as text: its content, then its calls."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join([part for part in (message.get("content") or "", *calls) if part])


def meaning(message: Message) -> str:
    """Equal for two answers that do the same: the same text, and the same calls whatever their ids and spacing."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with suppress(ValueError):  # a policy may write invalid JSON, which is compared as text
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        calls.append((call["function"]["name"], arguments))
    return json.dumps([(message.get("content") or "").strip(), calls], ensure_ascii=False)


@dataclass(frozen=True)
class BadLine:
    """A line that is not a trace, and the reason."""

    line: int
    why: str


@dataclass(frozen=True)
class Traces:
    traces: tuple[Trace, ...]
    bad: tuple[BadLine, ...] = ()

    @property
    def sha256(self) -> str:
        """The hash of what was read, so that a database that grew has another one."""
        said = json.dumps([asdict(trace) for trace in self.traces], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def unread(self) -> list[str]:
        return sorted({key for trace in self.traces for key in trace.unread})


def read(path: Path, *, drop_bad: bool = False) -> Traces:
    """Every trace of a .jsonl (also other programs' logs: ``logs.py``), or of a server's --data folder, in order.

    A malformed one stops here, or with ``drop_bad`` is counted and left out.
    """
    from earnest.replay import served

    found: list[Trace] = []
    bad: list[BadLine] = []
    seen: dict[str, int] = {}
    base = served.database(path)
    lines = _lines(path) if base is None else iter(enumerate(map(json.dumps, served.lines(base)), 1))
    for number, text in lines:
        try:
            trace = parse(as_trace(json.loads(text.decode() if isinstance(text, bytes) else text), number))
            if trace.id in seen:
                raise ValueError(f"the id {trace.id!r} was on line {seen[trace.id]} already; ids are unique")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            unreadable = (json.JSONDecodeError, UnicodeDecodeError)
            why = f"it is not JSON in UTF-8 ({error})" if isinstance(error, unreadable) else str(error)
            if not drop_bad:
                raise TraceError(
                    f"{path}, line {number}: {why}. Correct it, or leave such lines out with bad_lines=drop."
                ) from None
            bad.append(BadLine(number, why))
            continue
        seen[trace.id] = number
        found.append(trace)
    if not found:
        raise TraceError(f"{path} holds no trace ({len(bad)} bad lines); give one JSON object with messages per line.")
    return Traces(tuple(found), tuple(bad))


def _lines(path: Path) -> Iterator[tuple[int, str | bytes]]:
    try:
        with path.open("rb") as file:  # decoded line by line: one bad byte affects one line
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        raise TraceError(f"there is no file {path}; give a .jsonl file of traces.") from None
    except IsADirectoryError as error:
        raise TraceError(f"{path} cannot be read as JSON lines: {error}.") from None


def parse(data: Any) -> Trace:
    """A line's data as a trace; raises ``ValueError`` with what is wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"a trace is an object with messages, got {type(data).__name__}")
    name = data.get("id") or data.get("completion_id")
    if not isinstance(name, str):
        raise ValueError(f"id (or completion_id) is {name!r}; give a text that is unique in the file")
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is missing or empty; give the conversation as a list")
    asked: set[str] = set()
    checked = tuple(_message(f"messages[{i}]", message, asked) for i, message in enumerate(messages))
    if not any(m["role"] == "assistant" for m in checked):
        raise ValueError("no message is the assistant's, so there is no turn to replay")
    if checked[0]["role"] == "assistant":
        raise ValueError("the first message is the assistant's: there is no state before it to replay")
    reward = data.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, (int, float))):
        raise ValueError(f"reward is {reward!r}; give a number or null")
    for key, kinds in (("feedback", str), ("model", str), ("version", (int, str)), ("completion_id", str)):
        if data.get(key) is not None and not isinstance(data[key], kinds):
            raise ValueError(f"{key} is {data[key]!r}, of type {type(data[key]).__name__}")
    tools, meta = data.get("tools") or [], data.get("meta") or {}
    if not isinstance(meta, dict):
        raise ValueError(f"meta is a {type(meta).__name__}, not an object")
    return Trace(
        id=name,
        messages=checked,
        tools=tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)),
        reward=None if reward is None else float(reward),
        **{name: data.get(name) for name in ("feedback", "completion_id", "model", "version")},
        meta=meta,
        unread=tuple(sorted(set(data) - READ)),
    )


def _message(where: str, message: Any, asked: set[str]) -> Message:
    """The message with its content as one text. ``asked`` are the ids of the calls so far, and grows."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise ValueError(f"{where} has role {role!r}; known: {', '.join(ROLES)}")
    role, content = message["role"], _text(where, message.get("content"))
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise ValueError(f"{where}: only the assistant calls tools, not {role}")
    if content is None and not calls:
        raise ValueError(f"{where} ({role}) is empty: it has neither content nor tool_calls")
    kept: dict[str, Any] = {"role": role, "content": content}
    if calls:
        kept["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call, asked) for i, call in enumerate(calls)]
    if role == "tool":
        if message.get("tool_call_id") not in asked:
            raise ValueError(
                f"{where} answers the call {message.get('tool_call_id')!r}, which no message before it made"
            )
        kept["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        kept["name"] = message["name"]
    return kept


def _text(where: str, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError(f"{where}.content is neither text nor a list of text parts; images and audio are not supported")


def _call(where: str, call: Any, asked: set[str]) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} is not a function call: it needs id, type and function.name")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise ValueError(
            f"{where}.function.arguments is a {type(arguments).__name__}; OpenAI's format has JSON as text"
        )
    name = call.get("id")
    if not isinstance(name, str):
        raise ValueError(f"{where} has no id, so that no tool could answer it")
    asked.add(name)
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(where: str, tool: Any) -> Message:
    if not isinstance(tool, dict) or not isinstance((tool.get("function") or {}).get("name"), str):
        raise ValueError(f"{where} is not a tool: it needs type and function.name")
    return tool

"""Layouts: the columns of a row and the kind of training example that they give.

    columns                                layout           kind of example
    prompt, chosen, rejected               preferences      pair            (the prompt may be part of both answers)
    prompt, completion, label              judged           judged          (unpaired preferences)
    prompt, completion                     completions      demonstration
    messages | conversations (ShareGPT)    conversations    demonstration
    instruction, input, output             alpaca           demonstration
    prompt, answer                         questions        question        (for graders)
    prompt                                 questions        question        (for graders that need no answer)
    text                                   text             text

A prompt, a completion and an answer may be a text or a list of messages. The order of roles is checked; system
messages, tools and tool calls do not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from earnest.data.reading import DataError
from earnest.errors import nearest

Message = Mapping[str, Any]
Kind = Literal["pair", "judged", "demonstration", "question", "text"]
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


class RowError(ValueError):
    """The row does not fit its layout; the message gives the reason."""


@dataclass(frozen=True)
class Example:
    """A row in one form for all layouts. ``prompt`` are the messages before the trained ones; ``reply`` the trained
    messages (for a pair the better ones) and ``rejected`` the worse ones. ``text`` is a plain text without messages.
    ``row`` is the whole row, for graders."""

    kind: Kind
    prompt: tuple[Message, ...] = ()
    reply: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    text: str = ""
    label: bool | None = None
    answer: Any = None
    tools: tuple[Mapping[str, Any], ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A set of columns and what they mean."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Example]


def recognise(columns: Iterable[str], mapped: Mapping[str, str] | None = None) -> Layout:
    """The most specific layout whose columns the row has; ``mapped`` are the names that `data.columns` gave, {ours:
    theirs}."""
    there = set(columns)
    for name, their in (mapped or {}).items():
        if name not in there:
            raise DataError(f"data.columns.{name}: there is no column {their!r}; {nearest(their, there)}")
    for layout in LAYOUTS:
        if set(layout.columns) <= there:
            return layout
    known = "; ".join(", ".join(layout.columns) for layout in LAYOUTS)
    raise DataError(
        f"the columns {', '.join(sorted(there))} are no layout that is known ({known}); name yours with data.columns, "
        "for example data.columns.prompt=question data.columns.completion=answer for sft, or "
        "data.columns.prompt=question data.columns.answer=answer grade=exact for a reward."
    )


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the user's own names replaced: ``columns`` is {our name: their name}."""
    theirs = {their: our for our, their in columns.items()}
    return {theirs.get(key, key): value for key, value in row.items()}


def _preferences(row: Mapping[str, Any]) -> Example:
    chosen, rejected = _answer(row["chosen"], "chosen"), _answer(row["rejected"], "rejected")
    prompt = _prompt(row["prompt"]) if row.get("prompt") is not None else ()
    if prompt and chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise RowError("there is no prompt: give a prompt column, or messages that chosen and rejected share.")
    if chosen == rejected:
        raise RowError("chosen and rejected are the same answer, so they prefer nothing.")
    check_order((*prompt, *chosen))
    check_order((*prompt, *rejected))
    return Example("pair", prompt, chosen, rejected, tools=_tools(row), row=row)


def _completion(row: Mapping[str, Any]) -> Example:
    prompt, reply = _prompt(row["prompt"]), _answer(row["completion"], "completion")
    check_order((*prompt, *reply))
    return Example("demonstration", prompt, reply, tools=_tools(row), row=row)


def _judged(row: Mapping[str, Any]) -> Example:
    label = row["label"]
    if label in ("true", "false", "True", "False"):
        label = str(label).lower() == "true"
    if not isinstance(label, bool) and label not in (0, 1):
        raise RowError(f"label is {label!r}; it is true (wanted) or false (unwanted).")
    made = _completion(row)
    return Example("judged", made.prompt, made.reply, label=bool(label), tools=made.tools, row=row)


def _conversation(row: Mapping[str, Any]) -> Example:
    messages = _messages(row.get("messages", row.get("conversations")), "messages")
    if not messages:
        raise RowError("the list of messages is empty.")
    check_order(messages)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"the last message is the {messages[-1]['role']}'s; there is no assistant answer to learn.")
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return Example("demonstration", messages[:first], messages[first:], tools=_tools(row), row=row)


def _alpaca(row: Mapping[str, Any]) -> Example:
    given = row.get("input") or ""
    question = f"{_text(row['instruction'], 'instruction')}\n\n{given}" if given else row["instruction"]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return Example("demonstration", (*system, *_prompt(question)), _answer(row["output"], "output"), row=row)


def _question(row: Mapping[str, Any]) -> Example:
    if "answer" in row and row["answer"] in (None, ""):
        raise RowError("answer is empty; a grader compares with it.")
    return Example("question", _prompt(row["prompt"]), answer=row.get("answer"), tools=_tools(row), row=row)


def _text_only(row: Mapping[str, Any]) -> Example:
    return Example("text", text=_text(row["text"], "text"), row=row)


LAYOUTS = (
    Layout("preferences", ("chosen", "rejected"), _preferences),
    Layout("judged", ("prompt", "completion", "label"), _judged),
    Layout("completions", ("prompt", "completion"), _completion),
    Layout("conversations", ("messages",), _conversation),
    Layout("conversations (ShareGPT)", ("conversations",), _conversation),
    Layout("alpaca", ("instruction", "output"), _alpaca),
    Layout("questions", ("prompt", "answer"), _question),
    Layout("text", ("text",), _text_only),
    Layout("questions", ("prompt",), _question),
)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} is {_shown(value)}; it is a text.")
    if not value.strip():
        raise RowError(f"{name} is empty.")
    return value


def _decoded(value: object) -> object:
    """Messages that a column holds as a JSON text, as the files of `earnest replay` do; any other value as it is."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    several = parsed if isinstance(parsed, list) else [parsed]
    return parsed if several and all(isinstance(m, dict) and "role" in m for m in several) else value


def _prompt(value: object) -> tuple[Message, ...]:
    value = _decoded(value)
    messages = _messages(value, "prompt") if isinstance(value, list) else ()
    if isinstance(value, list) and not messages:
        raise RowError("prompt is empty.")
    return messages or ({"role": "user", "content": _text(value, "prompt")},)


def _answer(value: object, name: str) -> tuple[Message, ...]:
    value = _decoded(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return ({"role": "assistant", "content": _text(value, name)},)
    messages = _messages(value, name)
    if not messages or messages[-1]["role"] != "assistant":
        raise RowError(f"{name} does not end with an assistant message.")
    return messages


def _messages(value: object, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowError(f"{name} is {_shown(value)}; it is a list of messages.")
    return tuple(_message(m, name, i) for i, m in enumerate(value, 1))


def _message(value: object, name: str, number: int) -> Message:
    where = f"message {number} of {name}"
    if not isinstance(value, Mapping):
        raise RowError(f"{where} is {_shown(value)}; it is an object with role and content.")
    if "from" in value and "role" not in value:
        role = _SHAREGPT.get(str(value["from"]))
        if role is None:
            raise RowError(f"{where} is from {value['from']!r}; known are {', '.join(_SHAREGPT)}.")
        value = {"role": role, "content": value.get("value")}
    value = {k: v for k, v in value.items() if v is not None or k == "content"}  # Parquet fills absent keys with null
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise RowError(f"{where} has the role {role!r}; known are {', '.join(ROLES)}.")
    if content is None and role == "assistant" and value.get("tool_calls"):
        return {**value, "content": ""}
    if isinstance(content, list):
        return value
    if not isinstance(content, str):
        raise RowError(f"the content of {where} is {_shown(content)}; it is a text.")
    if not content.strip() and role in ("user", "assistant") and not value.get("tool_calls"):
        raise RowError(f"the content of {where} ({role}) is empty.")
    return value


_AFTER: dict[str, tuple[str, ...]] = {
    "start": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "tool": ("tool", "assistant", "user"),
}


def check_order(messages: Sequence[Message]) -> None:
    """System first, then user and assistant in turn; tool results follow an assistant message with tool calls."""
    before = "start"
    for number, message in enumerate(messages, 1):
        allowed = _AFTER[before]
        if before == "assistant" and messages[number - 2].get("tool_calls"):
            allowed = ("tool",)
        if message["role"] not in allowed:
            after = "at the beginning" if before == "start" else f"after the {before}'s message"
            raise RowError(f"message {number} is the {message['role']}'s; {after} comes {' or '.join(allowed)}.")
        before = message["role"]


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError(f"tools is {_shown(tools)}; it is a list of JSON schemas.") from None
    if not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
        raise RowError(f"tools is {_shown(tools)}; it is a list of JSON schemas.")
    return tuple(tools)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:40]}{'…' if len(text) > 40 else ''}"

"""Tool calls on OpenAI's wire: of a whole answer, of a stream, and forced by a grammar."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from earnest.models.tool_calls import MessageReader, tool_format
from earnest.serve.errors import BadRequest

if TYPE_CHECKING:
    from earnest.serve.host import Host


def _wired(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in OpenAI's form. The id has nine letters and digits, which Mistral's templates demand."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def message_of(reader: MessageReader, text: str) -> dict[str, Any]:
    """The fields of an answer's message. A call that cannot be read stays in the content as it was written."""
    parts = [*reader.feed(text), *reader.finish()]
    content = "".join(part.written for part in parts if part.kind in ("content", "error"))
    calls = [_wired(part.call) for part in parts if part.call is not None]
    found: dict[str, Any] = {"content": content if content or not calls else None}
    if calls:
        found["tool_calls"] = calls
    if reasoning := "".join(part.written for part in parts if part.kind == "reasoning"):
        found["reasoning_content"] = reasoning
    return found


class CallStream:
    """The deltas of one streamed answer. A call is one delta, when its last character is there."""

    def __init__(self, reader: MessageReader) -> None:
        self.reader = reader
        self._sent = 0

    def feed(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in (*self.reader.feed(text), *(self.reader.finish() if last else ())):
            if part.call is not None:
                found.append({"tool_calls": [{"index": self._sent, **_wired(part.call)}]})
                self._sent += 1
            elif part.written:
                found.append({"reasoning_content" if part.kind == "reasoning" else "content": part.written})
        return found


def forced_call(host: Host, tools: Sequence[Mapping[str, Any]]) -> str:
    """The grammar of exactly one call of one of the tools, in the format of the policy."""
    kind = tool_format(host.policy)
    key = {"hermes": "arguments", "llama": "parameters"}.get("" if kind is None else kind.name)
    if key is None:
        raise BadRequest(
            f"tool_choice: {host.policy.name} writes calls in a form that cannot be forced here; use 'auto' or 'none'.",
            "tool_choice",
        )
    schema = {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, key: tool["function"]["parameters"]},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }
    if key == "parameters":
        return host.grammars.json(schema)
    whole = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    # A mark that is a token of its own stands without quotes in such a grammar.
    added = host.policy.tokenizer.get_added_vocab()
    opened, closed = (mark if mark in added else f'"{mark}"' for mark in ("<tool_call>", "</tool_call>"))
    return host.grammars.lark(f"start: {opened} /\\n?/ call /\\n?/ {closed}\ncall: %json {whole}\n")

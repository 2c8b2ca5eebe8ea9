"""A policy's answer as a message: text, reasoning and tool calls, read in the format that its chat template writes.

    read_message(policy, prompt, tokens)
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function",
     "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}

transformers' ``ResponseParser`` finds the regions of the text, by the tokenizer's own ``response_template`` or by one
of the templates here. A call that cannot be read is not in ``tool_calls``; ``tool_call_errors`` has one sentence for
it. The id of a call has nine letters and digits, which Mistral's templates demand.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from earnest.errors import ConfigError

if TYPE_CHECKING:
    from earnest.models.protocol import PolicyLike  # imports torch, which a server does after it listens

_NEVER = r"(?!)"  # matches nothing: the prompt's text is not read, because only Hermes' may hold the start of an answer
_REASONING = {"open": "<think>", "close": "</think>"}
_COMMON: dict[str, dict[str, Any]] = {"tool_calls": {"repeats": True}, "content": {"content_args": {"strip": False}}}
"""What these fields have in every format."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls. marks: texts of which all are in the chat template. template:
    transformers' response template; its ``tool_calls`` are texts that ``read_calls`` reads. example: a call, for the
    error about a malformed one."""

    name: str
    marks: tuple[str, ...]
    example: str
    fields: Mapping[str, Mapping[str, Any]]
    start: str = _NEVER

    @cached_property
    def template(self) -> dict[str, Any]:
        every = {**self.fields, "content": self.fields.get("content", {})}
        fields = {name: {"content": "text", **_COMMON.get(name, {}), **spec} for name, spec in every.items()}
        return {"defaults": {"role": "assistant"}, "start_anchor_pattern": self.start, "fields": fields}


FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "harmony",
        ("<|channel|>", "functions."),
        '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"ARGUMENT": VALUE}<|call|>',
        {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close": "<|end|>",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)?\s?to=functions\."
                r"(?P<name>[\w.-]+)(?:[^{]*?)<\|message\|>",
                "close": ["<|call|>", "<|end|>"],
                "transform": {"name": "{name}", "content": "{content}"},
            },
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>",
                "close": ["<|return|>", "<|end|>"],
            },
        },
    ),
    ToolFormat(
        "gemma",
        ("<|tool_call>", "<tool_call|>"),
        "<|tool_call>call:NAME{ARGUMENT:VALUE}<tool_call|>",
        {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {"open_pattern": r"\s*<\|tool_call>", "close": "<tool_call|>"},
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    ),
    ToolFormat(
        "function-gemma",
        ("<start_function_call>",),
        "<start_function_call>call:NAME{ARGUMENT:VALUE}<end_function_call>",
        {
            "tool_calls": {"open_pattern": r"\s*<start_function_call>", "close": "<end_function_call>"},
            "content": {"close": ["<start_function_response>", "<end_of_turn>"]},
        },
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        '[TOOL_CALLS][{"name": NAME, "arguments": {"ARGUMENT": VALUE}}]',
        {"tool_calls": {"open_pattern": r"\s*\[TOOL_CALLS\]"}},
    ),
    ToolFormat(
        "glm",
        ("<tool_call>", "<arg_key>"),
        "<tool_call>NAME<arg_key>ARGUMENT</arg_key><arg_value>VALUE</arg_value></tool_call>",
        {
            "reasoning_content": _REASONING,
            "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"},
        },
        r"<\|assistant\|>",
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>",),
        '<tool_call>{"name": NAME, "arguments": {"ARGUMENT": VALUE}}</tool_call>',
        {
            "reasoning_content": _REASONING,
            "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"},
        },
        r"<\|im_start\|>assistant\n",
    ),
    ToolFormat(
        "llama",
        ("<|start_header_id|>", '"parameters": '),
        '{"name": NAME, "parameters": {"ARGUMENT": VALUE}}',
        {"tool_calls": {"open_pattern": r'<\|python_tag\|>|\A\s*(?=\{\s*"(?:name|type|parameters)"\s*:)'}},
    ),
)


def tool_format(policy: PolicyLike) -> ToolFormat | None:
    """The format of the policy's chat template, or None if it is none of those here."""
    template = getattr(policy.tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    whole = "\n".join(map(str, texts))
    return next((f for f in FORMATS if all(mark in whole for mark in f.marks)), None)


def check_tools(policy: PolicyLike) -> None:
    """Refuse a policy whose tool calls cannot be read."""
    if tool_format(policy) is None and getattr(policy.tokenizer, "response_template", None) is None:
        raise ConfigError(
            f"model: the chat template of {policy.name} writes no tool calls that earnest can read (it reads "
            f"{', '.join(f.name for f in FORMATS)}); use a model with tools, give a template that writes them "
            "(chat_template=FILE), or give its tokenizer a response_template."
        )


@dataclass(frozen=True)
class MessagePart:
    """A piece of an answer: text, reasoning, a whole call, or the error of one. written: what the policy wrote, without
    the marks around it. error: the sentence about a call that cannot be read."""

    kind: Literal["content", "reasoning", "call", "error"]
    written: str = ""
    call: Mapping[str, Any] | None = None
    error: str = ""


@dataclass
class MessageReader:
    """Reads an answer piece by piece. prompt: the text before it, special tokens included. tools: the schemas that a
    format without JSON needs for types."""

    policy: PolicyLike
    prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    calls: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _parser: Any = None
    _format: ToolFormat | None = None

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        own = getattr(self.policy.tokenizer, "response_template", None)
        self._format = None if own is not None else tool_format(self.policy)
        template = own if own is not None else None if self._format is None else self._format.template
        prompt = self.prompt if own is not None or (self._format and self._format.start != _NEVER) else ""
        if template is not None:
            self._parser = ResponseParser(template, prefix=prompt)

    def feed(self, text: str) -> Iterator[MessagePart]:
        """Read more of the answer's text (special tokens included)."""
        if self._parser is None:
            yield MessagePart("content", text)
        else:
            yield from self._deltas(lambda: self._parser.feed(text))

    def finish(self) -> Iterator[MessagePart]:
        """The end of the answer: a call that was not closed counts, too."""
        if self._parser is not None:
            yield from self._deltas(lambda: self._parser.finalize()[1])

    def _deltas(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> Iterator[MessagePart]:
        """The pieces of the parser's next events."""
        try:
            events = read()
        except (ValueError, KeyError) as error:
            self._parser = None  # what follows is text
            yield self._error(f"The tool call cannot be read: {str(error).splitlines()[0]}.")
            return
        for event in events:
            region = event["field"]
            if region == "tool_calls":
                if event["type"] == "region_close":
                    yield from self._region(event["value"])
            elif event["type"] == "region_chunk" and event["text"]:
                yield MessagePart("content" if region == "content" else "reasoning", event["text"])

    def _region(self, value: Any) -> Iterator[MessagePart]:
        try:
            found = list(read_calls(value, self._format, self.tools))
        except ValueError as error:
            shape = "" if self._format is None else f" A call has the form {self._format.example}"
            yield self._error(f"The tool call cannot be read: {error}.{shape}", str(value))
            return
        for name, arguments in found:
            function = {"name": name, "arguments": arguments}
            call = {"id": f"call{len(self.calls):05d}", "type": "function", "function": function}
            self.calls.append(call)
            yield MessagePart("call", call=call)

    def _error(self, text: str, written: str = "") -> MessagePart:
        self.errors.append(text)
        return MessagePart("error", written, error=text)


def read_message(
    policy: PolicyLike, prompt: Sequence[int], tokens: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The assistant message of sampled tokens; ``prompt`` are the tokens before them, ``tools`` their schemas. An
    answer without calls has its plain text as content, as ``policy.decode`` gives it."""
    kept = list(tokens)
    while kept and kept[-1] in policy.eos_ids:
        kept.pop()
    reader = MessageReader(policy, _raw(policy, prompt[-64:]), tools)
    pieces = [*reader.feed(_raw(policy, kept)), *reader.finish()]
    reasoning = "".join(p.written for p in pieces if p.kind == "reasoning").strip()
    message: dict[str, Any] = {"role": "assistant"}
    if reader.calls or reader.errors or reasoning:
        message["content"] = "".join(p.written for p in pieces if p.kind == "content").strip()
    else:
        message["content"] = policy.decode(tokens)
    if reasoning:
        message["reasoning_content"] = reasoning
    if reader.calls:
        message["tool_calls"] = reader.calls
    if reader.errors:
        message["tool_call_errors"] = reader.errors
    return message


def _raw(policy: PolicyLike, tokens: Sequence[int]) -> str:
    decode = policy.tokenizer.decode
    return str(decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def read_calls(
    value: Any, kind: ToolFormat | None, tools: Sequence[Mapping[str, Any]] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments) of the calls of one region; a ValueError has the reason why it has none."""
    if kind is None:  # the tokenizer's own template has read it
        for item in value if isinstance(value, list) else [value]:
            yield _one(item)
        return
    if kind.name == "harmony":
        yield _one({"name": value["name"], "arguments": value["content"]})
        return
    text = str(value).strip()
    if kind.name in ("gemma", "function-gemma"):
        yield _gemma(text, '<|"|>' if kind.name == "gemma" else "<escape>")
    elif kind.name == "mistral":
        yield from _mistral(text)
    elif kind.name == "glm":
        yield _glm(text, tools)
    elif text.startswith("<function="):
        yield _xml(text, tools)
    elif kind.name == "llama":
        yield from _llama(text)
    else:
        yield _one(_json(text))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_short(text)} is no JSON ({error})") from None


def _one(value: Any) -> tuple[str, dict[str, Any]]:
    """The call that a JSON object is."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError(f"{_short(json.dumps(value, default=repr))} has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments {_short(json.dumps(arguments))} are no object")
    return value["name"], dict(arguments)


def _gemma(text: str, quote: str) -> tuple[str, dict[str, Any]]:
    from transformers.utils.chat_parsing.content_parsers import parse_content

    match = re.fullmatch(r"call:([\w.-]+)\s*(\{.*\})", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{_short(text)} is not of the form call:NAME{{…}}")
    try:
        options = {"unquoted_keys": True, "string_delims": [[quote, quote]]}
        arguments = parse_content(match[2], "json", options)
    except ValueError as error:
        raise ValueError(f"{_short(match[2])} cannot be read ({str(error).splitlines()[-1]})") from None
    return _one({"name": match[1], "arguments": arguments})


def _mistral(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A JSON list, or NAME[ARGS]{…} with [TOOL_CALLS] between calls, and a call's id after its name in [CALL_ID]."""
    for part in text.split("[TOOL_CALLS]"):
        part = part.strip()
        named = re.fullmatch(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", part, re.DOTALL)
        if named is not None:
            yield _one({"name": named[1], "arguments": _json(named[2])})
            continue
        found = _json(part)
        for item in found if isinstance(found, list) else [found]:
            yield _one(item)


def _xml(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Qwen3-Coder's <function=NAME><parameter=KEY>VALUE</parameter></function>."""
    match = re.fullmatch(r"<function=([^>\n]+)>(.*)</function>", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{_short(text)} does not end with </function>")
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL)
    return match[1].strip(), _typed(match[1].strip(), pairs, tools)


def _glm(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """GLM's NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, with line breaks between them."""
    argument = r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    match = re.fullmatch(rf"([\w.-]+)((?:{argument})*)\s*", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{_short(text)} is not a name with pairs of <arg_key> and <arg_value>")
    return match[1], _typed(match[1], re.findall(argument, match[2], re.DOTALL), tools)


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments that are written as text. A value is read as JSON unless its parameter is a string, or it is no
    JSON."""
    functions = [tool.get("function", tool) for tool in tools]
    types: Mapping[str, Any] = next((f["parameters"]["properties"] for f in functions if f.get("name") == name), {})
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        arguments[key] = value
        if types.get(key, {}).get("type") != "string":
            with contextlib.suppress(ValueError, RecursionError):
                arguments[key] = json.loads(value)
    return arguments


def _llama(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """JSON objects with semicolons between them, or NAME.call(KEY=VALUE, …)."""
    called = re.fullmatch(r"(\w+)\.call\((.*)\)", text, re.DOTALL)
    if called is not None:
        try:
            node = ast.parse(f"f({called[2]})", mode="eval").body
            assert isinstance(node, ast.Call)
            yield called[1], {k.arg or "": ast.literal_eval(k.value) for k in node.keywords}
        except (SyntaxError, ValueError):
            raise ValueError(f"{_short(text)} is no call") from None
        return
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            item, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_short(text[place:])} is no JSON ({error})") from None
        yield _one(item)
        place = len(text) - len(text[place:].lstrip(" \n;,"))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"

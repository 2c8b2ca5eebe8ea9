"""Other programs' logs as traces. A record is recognised by its keys.

    keys of the record                     format
    request, response                      a log of OpenAI chat completions or of the Responses API
    conversations                          ShareGPT, also with function_call and observation
    steps                                  agent trajectories in ATIF (Harbor, Terminal-Bench)
    history | trajectory                   SWE-agent and its data sets
    prompt, completion                     rollouts of verifiers, or completions as messages
    messages                               a trace, as it is

A record without an id gets the number of its line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
_SOURCES = {"agent": "assistant", "ai": "assistant", "model": "assistant", "environment": "user"}


def as_trace(record: Any, line: int) -> Any:
    """The record with ``messages`` as a trace has them; what is no record of a known format is returned as it is."""
    if not isinstance(record, dict):
        return record
    for keys, convert in FORMATS:
        if all(record.get(key) is not None for key in keys):
            name = record.get("id") or record.get("completion_id")
            made = {**{k: v for k, v in record.items() if k not in (*keys, "id")}, **convert(record)}
            return {"id": str(name or made.get("id") or f"line-{line}"), **{k: v for k, v in made.items() if k != "id"}}
    return record


def _openai(record: Record) -> dict[str, Any]:
    request, response = record["request"], record["response"]
    if not isinstance(request, dict) or not isinstance(response, dict):
        raise ValueError("request and response are not both objects")
    request, response = request.get("body", request), response.get("body", response)  # a batch file has bodies
    if "choices" not in response and "output" not in response:
        raise ValueError(f"the response has no answer: {str(response.get('error', response))[:120]}")
    asked = request["messages"] if "messages" in request else _items(request)
    if "choices" in response:
        answer = [response["choices"][0]["message"]]
    else:
        answer = _responses(response["output"])
    messages = [_message(m) for m in (*asked, *answer)]
    model = {} if request.get("model") is None else {"model": request["model"]}
    return {"id": response.get("id"), "messages": messages, "tools": _tools(request.get("tools")), **model}


def _items(request: Record) -> list[Record]:
    """The messages of a request to the Responses API."""
    given = request["input"]
    system = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    return [*system, *([{"role": "user", "content": given}] if isinstance(given, str) else _responses(given))]


def _responses(items: Sequence[Record]) -> list[dict[str, Any]]:
    """Items of the Responses API as messages. Neighbouring calls belong to one message; reasoning is left out."""
    found: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(_call(item, item["call_id"]))
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message":
            content = item["content"]
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            found.append({"role": item["role"], "content": content})
        elif kind != "reasoning":
            raise ValueError(f"an item of the type {kind!r}; known: message, function_call, function_call_output")
    return found


def _sharegpt(record: Record) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    calls, answered = 0, 0
    for turn in record["conversations"]:
        role = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        if role == "function_call":
            if calls == answered:  # neighbouring calls belong to one message
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            calls += 1
            messages[-1]["tool_calls"].append(_call(json.loads(text), f"call_{calls}"))
        elif _SHAREGPT.get(role, role) == "tool":
            answered += 1
            messages.append({"role": "tool", "tool_call_id": f"call_{answered}", "content": text})
        else:
            messages.append({"role": _SHAREGPT.get(role, role), "content": text})
    return {"messages": messages, "tools": _tools(record.get("tools")), "system": None}


def _tools(given: Any) -> list[Record]:
    """Tools in OpenAI's form, from a list or its JSON, with or without the outer object."""
    tools = json.loads(given) if isinstance(given, str) and given else given or ()
    return [t if "function" in t else {"type": "function", "function": t} for t in tools]


def _atif(record: Record) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for step in record["steps"]:
        role = _SOURCES.get(step["source"], step["source"])
        made: dict[str, Any] = {"role": role, "content": step.get("message") or None}
        if step.get("tool_calls"):
            made["tool_calls"] = [
                _call({"name": c["function_name"], "arguments": c.get("arguments", {})}, c["tool_call_id"])
                for c in step["tool_calls"]
            ]
        if made["content"] is None and "tool_calls" not in made:
            continue  # a step with reasoning alone
        messages.append(made)
        for result in (step.get("observation") or {}).get("results", ()):
            answered = result.get("source_call_id")
            role = {"role": "tool", "tool_call_id": answered} if answered else {"role": "user"}
            messages.append({**role, "content": result.get("content") or "(no output)"})
    return {"id": record.get("session_id"), "messages": messages}


def _swe_agent(record: Record) -> dict[str, Any]:
    """``history`` are messages. ``trajectory`` are messages, or steps with a response and its observation."""
    turns = record.get("history") or record["trajectory"]
    if turns and "action" in turns[0]:
        raise ValueError("trajectory has steps without the prompt of the policy; SWE-agent's history has it")
    messages = []
    for turn in turns:
        made = _message(turn)
        if made["role"] == "tool" and "tool_call_id" not in made:
            made = {**made, "tool_call_id": (turn.get("tool_call_ids") or [None])[0]}
        messages.append(made)
    solved = record.get("target", (record.get("info") or {}).get("resolved"))
    reward = {"reward": float(solved)} if isinstance(solved, bool) else {}
    return {"id": record.get("instance_id"), "messages": messages, **reward}


def _completion(record: Record) -> dict[str, Any]:
    def messages(value: Any, role: str) -> list[Record]:
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    found = [*messages(record["prompt"], "user"), *messages(record["completion"], "assistant")]
    return {"messages": [_message(m) for m in found]}


def _message(message: Record) -> dict[str, Any]:
    """A message with the field's role names, a text under ``content`` and arguments as JSON text."""
    role = _SOURCES.get(message.get("role", ""), message.get("role"))
    made = {"role": role, "content": message.get("content", message.get("text"))}
    kept = {k: message[k] for k in ("tool_call_id", "name") if message.get(k) is not None}
    calls = [_call(c.get("function", c), c.get("id")) for c in message.get("tool_calls") or ()]
    return {**made, **kept, **({"tool_calls": calls} if calls else {})}


def _call(function: Record, name: object) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


FORMATS: tuple[tuple[tuple[str, ...], Callable[[Record], dict[str, Any]]], ...] = (
    (("request", "response"), _openai),
    (("conversations",), _sharegpt),
    (("steps",), _atif),
    (("history",), _swe_agent),
    (("trajectory",), _swe_agent),
    (("prompt", "completion"), _completion),
)

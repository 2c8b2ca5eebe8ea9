"""Other programs' logs as traces: each format by hand, into the same conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from earnest.replay.errors import TraceError
from earnest.replay.local import hindsight_messages
from earnest.replay.traces import Trace, read

TOOL = {"name": "clock", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"city": "Paris"}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What time is it in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "11:41"},
]
ANSWER = {"role": "assistant", "content": "11:41."}
FUNCTION = {"type": "function", "function": TOOL}
CHAT = {
    "request": {"model": "m", "messages": ASKED, "tools": [FUNCTION]},
    "response": {"id": "chatcmpl-1", "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]},
}
BATCH = {key: {"body": value} for key, value in CHAT.items()}
RESPONSES = {
    "request": {
        "model": "m",
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What time is it in Paris?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "11:41"},
        ],
        "tools": [{"type": "function", **TOOL}],
    },
    "response": {
        "id": "resp-1",
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "11:41."}]}],
    },
}
SHAREGPT = {
    "system": "Be short.",
    "conversations": [
        {"from": "human", "value": "What time is it in Paris?"},
        {"from": "function_call", "value": '{"name": "clock", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "11:41"},
        {"from": "gpt", "value": "11:41."},
    ],
    "tools": json.dumps([TOOL]),
}
ATIF = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s-1",
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be short."},
        {"step_id": 2, "source": "user", "message": "What time is it in Paris?"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "clock", "arguments": {"city": "Paris"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "11:41"}]},
        },
        {"step_id": 4, "source": "agent", "message": "11:41."},
    ],
}
SWE_AGENT = {
    "instance_id": "repo-1",
    "history": [
        ASKED[0] | {"agent": "main"},
        ASKED[1] | {"agent": "main"},
        ASKED[2] | {"thought": "", "action": "clock"},
        {"role": "tool", "content": "11:41", "tool_call_ids": ["c1"]},
        ANSWER,
    ],
    "info": {"resolved": True},
}
VERIFIERS = {"prompt": ASKED[:2], "completion": [*ASKED[2:], ANSWER], "reward": 0.5}


def traces(tmp_path: Path, *records: dict[str, Any]) -> tuple[Trace, ...]:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return read(tmp_path / "log.jsonl").traces


@pytest.mark.parametrize(
    ("record", "name", "reward", "tools"),
    [
        (CHAT, "chatcmpl-1", None, 1),
        (BATCH, "chatcmpl-1", None, 1),
        (RESPONSES, "resp-1", None, 1),
        (SHAREGPT, "line-1", None, 1),
        (ATIF, "s-1", None, 0),
        (SWE_AGENT, "repo-1", 1.0, 0),
        (VERIFIERS, "line-1", 0.5, 0),
    ],
    ids=["chat", "batch", "responses", "sharegpt", "atif", "swe-agent", "verifiers"],
)
def test_every_format_is_the_same_conversation(
    tmp_path: Path, record: dict[str, Any], name: str, reward: float | None, tools: int
) -> None:
    (found,) = traces(tmp_path, record)
    assert (found.id, found.reward, len(found.tools)) == (name, reward, tools)
    (call,) = [c for m in found.messages for c in m.get("tool_calls", ())]
    assert call["function"] == CALL["function"]
    assert [(m["role"], m["content"]) for m in found.messages] == [(m["role"], m["content"]) for m in (*ASKED, ANSWER)]
    assert [m["tool_call_id"] for m in found.messages if m["role"] == "tool"] == [call["id"]]
    assert all(tool["function"]["name"] == "clock" for tool in found.tools)


def test_records_without_an_id_are_named_by_their_line(tmp_path: Path) -> None:
    assert [t.id for t in traces(tmp_path, SHAREGPT, SHAREGPT, ATIF)] == ["line-1", "line-2", "s-1"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            {"request": {"input": []}, "response": {"output": [{"type": "web_search_call"}]}},
            "line 1: .*web_search_call",
        ),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "line 1: .*role 'robot'"),
        ({"trajectory": [{"action": "ls", "observation": "a"}]}, "line 1: .*SWE-agent's history has it"),
        ({"conversations": [{"from": "function_call", "value": "clock"}]}, "line 1: it is not JSON"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(tmp_path: Path, record: dict[str, Any], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        traces(tmp_path, record)


def test_a_turn_with_calls_has_the_tools_results_as_its_hint(tmp_path: Path) -> None:
    """Without a later user message the hint of a call is its result; a turn after a result keeps the whole history."""
    (found,) = traces(tmp_path, CHAT | {"feedback": "Give the time zone."})
    call, answer = found.turns()
    hinted = hindsight_messages(answer)
    assert [m["role"] for m in hinted] == ["system", "user", "assistant", "tool"]
    assert "Give the time zone." in hinted[1]["content"] and hinted[2:] == [dict(m) for m in found.messages[2:4]]
    (found,) = traces(tmp_path, CHAT)
    call, answer = found.turns()
    assert hindsight_messages(call)[-1]["content"].endswith("The tool returned afterwards:\n11:41")
    assert answer.results is None


def test_neighbouring_calls_of_sharegpt_are_one_message_and_keep_their_results(tmp_path: Path) -> None:
    turns = [("human", "hi"), *[("function_call", json.dumps({"name": n, "arguments": {}})) for n in "ab"]]
    turns += [("observation", "A"), ("observation", "B"), ("gpt", "done")]
    (found,) = traces(tmp_path, {"conversations": [{"from": role, "value": text} for role, text in turns]})
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    names = {call["id"]: call["function"]["name"] for call in found.messages[1]["tool_calls"]}
    assert [(names[m["tool_call_id"]], m["content"]) for m in found.messages[2:4]] == [("a", "A"), ("b", "B")]


def test_a_response_without_an_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: the response has no answer: rate limit"):
        traces(tmp_path, {"request": {"messages": []}, "response": {"error": "rate limit"}})

"""Reading traces: what is accepted, what is refused and in which words; pairs there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.data import trace_example, trace_schema
from earnest.errors import EarnestError
from earnest.replay import pairs as files
from earnest.replay.errors import ReplayError, TraceError
from earnest.replay.traces import meaning, parse, plain_text, read
from tests.replay.records import call, pair, said, user, write_traces

TALK = [
    user("What time is it?"),
    call("clock", city="Paris"),
    {"role": "tool", "tool_call_id": "c0", "content": "11:41"},
]


def trace(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "a", "messages": list(messages), **more}


def test_turns_states_and_hindsight_by_hand() -> None:
    found = parse(trace(*TALK, said("It is 11:41."), user("Wrong, in Rome!"), said("Oh."), feedback="Better."))
    first, second, third = found.turns()
    assert [t.place for t in found.turns()] == [1, 3, 5] and [t.last for t in found.turns()] == [False, False, True]
    assert first.state == found.messages[:1] and second.answer["content"] == "It is 11:41."
    assert first.next_message == second.next_message == "Wrong, in Rome!"
    assert third.next_message == "Better.", "behind the last turn the feedback on the trace is what was said"
    assert parse(trace(user("hi"), said("ho"))).turns()[0].next_message is None


def test_every_trace_of_the_schema_is_read(tmp_path: Path) -> None:
    """The shipped examples obey the published schema, and the reader takes each of them."""
    for line in trace_example():
        jsonschema.validate(line, trace_schema())
    found = read(write_traces(tmp_path / "t.jsonl", trace_example()))
    assert len(found.traces) == len(trace_example()) and found.bad == () and found.unread == []
    assert sum(len(t.turns()) for t in found.traces) == 3 * len(trace_example())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "a trace is an object"),
        ({"messages": []}, "id .* is None"),
        (trace(), "messages is missing or empty"),
        (trace(user("x")), "no message is the assistant's"),
        (trace(said("x")), "no state before it"),
        (trace({"role": "robot", "content": "x"}, said("y")), "role 'robot'; known: system"),
        (trace(user("x"), {"role": "assistant", "content": None}), "is empty"),
        (trace({**user("x"), "tool_calls": [1]}, said("y")), "only the assistant calls tools"),
        (
            trace(user("x"), {"role": "tool", "tool_call_id": "z", "content": "1"}, said("y")),
            "the call 'z', which",
        ),
        (trace(user("x"), {"role": "assistant", "tool_calls": [{"id": "c"}]}), "not a function call"),
        (trace({"role": "user", "content": [{"type": "image_url"}]}, said("y")), "images and audio are not supported"),
        (trace(user("x"), said("y"), reward="good"), "reward is 'good'"),
        (trace(user("x"), said("y"), version=[1]), "version is"),
        (trace(user("x"), said("y"), tools=[{}]), r"tools\[0\] is not a tool"),
        (trace(user("x"), said("y"), meta=3), "meta is a int"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(tmp_path: Path, data: Any, why: str) -> None:
    good = trace(user("x"), said("y")) | {"id": "good"}
    path = write_traces(tmp_path / "t.jsonl", [good, data])
    with pytest.raises(TraceError, match=f"line 2: .*{why}"):
        read(path)
    found = read(path, drop_bad=True)
    assert len(found.traces) == 1 and found.bad[0].line == 2


def test_files_that_are_not_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(TraceError, match="there is no file"):
        read(path)
    path.write_text('{"id": \n')
    with pytest.raises(TraceError, match="line 1: it is not JSON"):
        read(path)
    with pytest.raises(TraceError, match="holds no trace"):
        read(path, drop_bad=True)
    write_traces(path, [trace(user("x"), said("y"))] * 2)
    with pytest.raises(TraceError, match="line 2: the id 'a' was on line 1 already"):
        read(path)
    path = tmp_path / "x.sqlite3"
    path.write_bytes(b"junk")
    with pytest.raises(TraceError, match="not a database of `earnest serve`"):
        read(path)


def test_unread_keys_are_reported_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parse(
        trace({"role": "user", "content": parts}, said("y"), usage={}, created=1, completion_id="c", version=3)
    )
    assert found.unread == ("created", "usage") and found.messages[0]["content"] == "ab"
    assert (found.completion_id, found.version) == ("c", 3)


def test_the_same_answer_is_the_same_whatever_its_ids_and_spacing() -> None:
    one, two = call("clock", 0, city="Paris", at=1), call("clock", 7, at=1, city="Paris")
    assert meaning(one) == meaning(two) and one != two
    assert meaning(one) != meaning(call("clock", 0, city="Rome", at=1)) != meaning(said("clock"))
    assert meaning(said(" a\n")) == meaning(said("a"))
    assert plain_text(one) == 'clock({"city": "Paris", "at": 1})'


texts = st.text(min_size=1).filter(str.strip)


@pytest.mark.integration
@given(prompt=texts, chosen=texts, rejected=texts, city=texts)
def test_pairs_are_read_back_from_disk_unchanged(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, chosen: str, rejected: str, city: str
) -> None:
    """Any text, and calls with any arguments: what is read is what was written."""
    from dataclasses import replace

    made = [replace(pair(chosen + "!", rejected, prompt), rejected=call("f", city=city), tools=({"type": "function"},))]
    path = tmp_path_factory.mktemp("pairs") / "p.parquet"
    files.write(path, made, {"seed": 3})
    assert files.read(path) == made and files.about(path) == {"seed": 3}


@pytest.mark.integration
def test_pairs_of_others_and_files_that_are_none(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "p.parquet"
    with pytest.raises(ReplayError, match=r"there is no file .*earnest replay TRACES"):
        files.read(path)
    path.write_text("junk")
    with pytest.raises(ReplayError, match="not a parquet file"):
        files.read(path)

    def put(**columns: list[Any]) -> None:
        pq.write_table(pa.table(columns), path)

    messages = {"prompt": [[user("q")]], "chosen": [said("a")], "rejected": [said("b")]}
    put(**messages)  # somebody else's file, messages as structs
    assert files.read(path)[0].chosen["content"] == "a" and files.read(path)[0].teacher == "given"
    put(prompt=["q"], chosen=["a"], rejected=['{"city": "Rome"}'])  # plain texts, one of which is JSON
    (plain,) = files.read(path)
    assert (plain.prompt, plain.chosen) == ((user("q"),), said("a"))
    assert plain.rejected["content"] == '{"city": "Rome"}'
    put(**{**messages, "chosen": [[said("a")]], "rejected": [[said("b")]]})  # a list of one message
    assert files.read(path)[0].chosen["content"] == "a"
    put(**{**messages, "chosen": [[user("q"), said("a")]]})
    with pytest.raises(ReplayError, match=r"row 0: chosen must be one assistant message .* or a text, got"):
        files.read(path)
    put(prompt=[json.dumps([user("q")])], chosen=[json.dumps(said("a"))])
    with pytest.raises(ReplayError, match="has no column rejected"):
        files.read(path)
    put(**{**messages, "rejected": [said("a")]})
    with pytest.raises(ReplayError, match="row 0: chosen and rejected are the same answer"):
        files.read(path)
    put(**{**messages, "chosen": [user("a")]})
    with pytest.raises(ReplayError, match="chosen must be one assistant message"):
        files.read(path)
    files.write(path, [], {})
    with pytest.raises(EarnestError, match="holds no pair"):
        files.read(path)


def test_a_byte_that_is_not_utf8_affects_one_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    good = [json.dumps(trace(user("hi"), said("ho")) | {"id": name}).encode() for name in ("a", "b")]
    path.write_bytes(b"\n".join([good[0], good[0].replace(b"hi", b"h\xff"), good[1]]) + b"\n")
    with pytest.raises(TraceError, match="line 2: it is not JSON in UTF-8"):
        read(path)
    found = read(path, drop_bad=True)
    assert [t.id for t in found.traces] == ["a", "b"] and [b.line for b in found.bad] == [2]

"""The fixed data files: complete, of the shape that is promised, and what their generator would write."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest import data
from earnest.data import TemplateError
from scripts.nano import fixed

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort 3152."}]


def test_reprompt_by_hand() -> None:
    told = data.reprompt(QUESTION, "1235", "5321 goes down, not up.")
    assert told[0] == QUESTION[0]
    assert told[1] == {
        "role": "user",
        "content": (
            "Sort 3152.\n\nA correct solution:\n1235\n\nFeedback on your attempt:\n5321 goes down, not up.\n\n"
            "Now solve the original question."
        ),
    }
    assert QUESTION[1]["content"] == "Sort 3152."  # the student's own prompt is untouched


def test_a_section_without_text_is_left_out() -> None:
    assert data.reprompt(QUESTION, "1235", None)[1]["content"] == (
        "Sort 3152.\n\nA correct solution:\n1235\n\nNow solve the original question."
    )
    assert data.reprompt(QUESTION, "", "Too long.")[1]["content"] == (
        "Sort 3152.\n\nFeedback on your attempt:\nToo long.\n\nNow solve the original question."
    )


def test_hindsight_by_hand() -> None:
    call = {"role": "tool", "content": "1"}
    shown = data.hindsight([*QUESTION, call], "No, it is 1235.")
    content = "Sort 3152.\n\nThe user said afterwards:\nNo, it is 1235."
    assert shown == [QUESTION[0], {**QUESTION[1], "content": content}, call]


texts = st.text(min_size=1).filter(str.strip)


@given(question=texts, solution=texts, feedback=texts)
def test_texts_go_in_unchanged_whatever_they_contain(question: str, solution: str, feedback: str) -> None:
    """Also braces, which a template engine might read as slots of its own."""
    content = data.reprompt([{"role": "user", "content": question}], solution, feedback)[0]["content"]
    positions = [content.find(question), content.rfind(solution), content.rfind(feedback)]
    assert min(positions) >= 0
    assert content.startswith(question)
    assert content.count("\n\nFeedback on your attempt:\n" + feedback) >= 1
    assert data.hindsight([{"role": "user", "content": question}], feedback)[0]["content"].endswith(feedback)


def test_nothing_to_tell_is_an_error_and_not_the_untold_prompt() -> None:
    with pytest.raises(TemplateError, match="neither a solution nor feedback"):
        data.reprompt(QUESTION, None, "")
    with pytest.raises(TemplateError, match="empty"):
        data.hindsight(QUESTION, "  ")
    answered = [*QUESTION, {"role": "assistant", "content": "1235"}]
    with pytest.raises(TemplateError, match="role 'assistant'"):
        data.reprompt(answered, "1235", None)
    with pytest.raises(TemplateError, match="role None"):
        data.hindsight([], "No.")


def test_every_example_trace_follows_the_schema() -> None:
    schema = data.trace_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    traces = data.trace_example()
    assert len(traces) >= 4
    for trace in traces:
        jsonschema.validate(trace, schema)
        calls = [call for m in trace["messages"] for call in m.get("tool_calls", ())]
        assert len(calls) == 1
        assert isinstance(json.loads(calls[0]["function"]["arguments"]), dict)
        answers = [m["tool_call_id"] for m in trace["messages"] if m["role"] == "tool"]
        assert answers == [calls[0]["id"]]
        assert sum(m["role"] == "user" for m in trace["messages"]) == 2
    assert {trace["reward"] for trace in traces} == {0.0, 1.0}


@pytest.mark.parametrize(
    "broken",
    [
        {"id": "x", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "x", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]},
        {"id": "x", "messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "no call id"}]},
        {"id": "x", "messages": [{"role": "user", "content": "hi"}, {"role": "robot", "content": "beep"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    ],
)
def test_the_schema_refuses_what_is_no_trace(broken: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, data.trace_schema())


def test_probes_and_plain_text_are_there() -> None:
    probes = data.probes()
    assert len({p["prompt"] for p in probes}) == len(probes) >= 50
    assert all(p["answer"] in p["allowed"] for p in probes)
    assert {p["answer"] for p in probes} == {"A", "B", "yes", "no"}
    assert len(data.plain_heldout()) >= 100


@pytest.mark.parametrize("name", fixed.FILES)
def test_the_files_are_what_their_script_writes(name: str) -> None:
    assert data.text(name) == fixed.FILES[name]()

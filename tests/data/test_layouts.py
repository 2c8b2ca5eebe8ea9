"""Each layout becomes the same kind of example; a row that does not fit is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from earnest.data.layouts import DataError, RowError, recognise, renamed

USER, ANSWER, WORSE = (
    {"role": "user", "content": "Sort: b a"},
    {"role": "assistant", "content": "a b"},
    {"role": "assistant", "content": "b a"},
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "4"}


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"messages": [USER, ANSWER]}, "conversations"),
        (
            {"conversations": [{"from": "human", "value": "Sort: b a"}, {"from": "gpt", "value": "a b"}]},
            "conversations (ShareGPT)",
        ),
        ({"prompt": "Sort: b a", "completion": "a b"}, "completions"),
        ({"prompt": [USER], "completion": [ANSWER]}, "completions"),
        ({"instruction": "Sort: b a", "input": "", "output": "a b"}, "alpaca"),
    ],
)
def test_demonstrations(row: dict[str, Any], layout: str) -> None:
    found = recognise(row)
    example = found.read(row)
    assert (found.name, example.kind) == (layout, "demonstration")
    assert (example.prompt, example.reply) == ((USER,), (ANSWER,))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Sort: b a", "chosen": "a b", "rejected": "b a"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
        {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
    ],
    ids=["texts", "messages", "implicit prompt", "prompt repeated"],
)
def test_preferences(row: dict[str, Any]) -> None:
    example = recognise(row).read(row)
    assert example.kind == "pair"
    assert (example.prompt, example.reply, example.rejected) == ((USER,), (ANSWER,), (WORSE,))


def test_the_most_specific_layout_wins_and_other_names_are_mapped() -> None:
    row = {"prompt": "q", "completion": "a", "label": True, "answer": "a"}
    assert recognise(row).name == "judged" and recognise(row).read(row).label is True
    row = renamed({"question": "2+2?", "solution": 4}, {"prompt": "question", "answer": "solution"})
    assert recognise(row).read(row).answer == 4
    with pytest.raises(DataError, match=r"columns question, solution are no layout") as refused:
        recognise({"question": 1, "solution": 2})
    for way in ("data.columns.completion=answer for sft", "data.columns.answer=answer grade=exact for a reward"):
        assert f"data.columns.prompt=question {way}" in str(refused.value)


def test_tool_calls_tools_and_system_messages_survive() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, CALL, RESULT, ANSWER]
    example = recognise({"messages": messages}).read({"messages": messages, "tools": [{"type": "function"}]})
    assert example.prompt == ({"role": "system", "content": "Be brief."}, USER)
    assert example.reply[0]["tool_calls"] == CALL["tool_calls"] and example.reply[1] == RESULT
    assert example.tools == ({"type": "function"},)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": "hello"}, "is a list of messages"),
        ({"messages": [USER]}, "there is no assistant answer to learn"),
        ({"messages": [ANSWER]}, "at the beginning comes system or developer or user"),
        ({"messages": [USER, USER, ANSWER]}, "message 2 is the user's; after the user's message comes assistant"),
        ({"messages": [USER, CALL, ANSWER]}, "after the assistant's message comes tool"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "has the role 'robot'"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, r"\(assistant\) is empty"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "it is a text"),
        ({"messages": [USER, "x"]}, "an object with role and content"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "is from 'alien'"),
        ({"prompt": "", "completion": "x"}, "prompt is empty"),
        ({"prompt": "q", "completion": None}, "completion is NoneType"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "the same answer"),
        ({"chosen": [ANSWER], "rejected": [WORSE]}, "there is no prompt"),
        ({"prompt": "q", "chosen": [USER], "rejected": "a"}, "does not end with an assistant message"),
        ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [WORSE]}, "message 2 is the user's"),
        ({"prompt": "q", "completion": "a", "label": "maybe"}, "label is 'maybe'"),
        ({"prompt": "q", "answer": ""}, "answer is empty"),
        ({"text": "  "}, "text is empty"),
        ({"messages": [USER, ANSWER], "tools": "x"}, "a list of JSON schemas"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        recognise(row).read(row)

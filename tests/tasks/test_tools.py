"""Tools: schema, checked arguments, observations; and the built-in environments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from earnest import plugins
from earnest.tasks import Environment, Prompt, TaskError
from earnest.tasks.environment import Message
from earnest.tasks.playing import demonstration, play
from earnest.tasks.sandbox import PROTECTIONS, Limits, Sandbox, SandboxError, protections
from earnest.tasks.tool_environment import ToolEnvironment
from earnest.tasks.tool_tasks import (
    CALCULATOR,
    ENVIRONMENTS,
    FIX,
    LOOKUP,
    Fix,
    FixTask,
    _broken,
    calculate,
    check,
    oracle,
)
from earnest.tasks.tools import Tool, Tools

MINE = """
from typing import Literal

def paint(colour: Literal["red", "blue"], coats: int = 1, _house: dict | None = None) -> str:
    \"\"\"Paint the house.

    Args:
        colour: The colour.
        coats: How many coats.
    \"\"\"
    print("painting")
    return f"{_house['name']} is {colour}, {coats} coats"
"""


@pytest.fixture(scope="module")
def paint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("tools") / "mine.py"
    file.write_text(MINE)
    return plugins.find(f"{file}:paint", "tools")


def test_the_schema_hides_what_the_environment_gives(paint: Any) -> None:
    function = Tool.of(paint).schema["function"]
    assert (function["name"], function["description"]) == ("paint", "Paint the house.")
    assert function["parameters"]["properties"] == {
        "colour": {"type": "string", "enum": ["red", "blue"], "description": "The colour."},
        "coats": {"type": "integer", "description": "How many coats."},
    }
    assert function["parameters"]["required"] == ["colour"]


def test_a_call_gives_what_was_printed_and_returned(paint: Any) -> None:
    seen = Tools([paint]).call("paint", {"colour": "red", "coats": "2"}, {"house": {"name": "mine"}})
    assert (seen.text, seen.failed) == ("painting\nmine is red, 2 coats", False)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("pant", {}, "there is no tool 'pant'"),
        ("paint", {}, "paint needs the argument colour"),
        ("paint", {"colour": "green"}, "'red' or 'blue'"),
        ("paint", {"colour": "red", "coats": "many"}, 'coats="many"'),
        ("paint", {"colour": "red", "size": 1}, "paint has no argument size (its arguments: colour, coats)"),
        ("paint", {"colour": "red", "_house": {}}, "paint has no argument _house"),
    ],
)
def test_a_wrong_call_is_one_sentence(paint: Any, name: str, arguments: dict[str, Any], text: str) -> None:
    seen = Tools([paint]).call(name, arguments, {"house": {"name": "mine"}})
    assert seen.failed and seen.text.startswith("Error: ") and text in seen.text and "\n" not in seen.text


def test_a_tool_that_raises_is_an_observation() -> None:
    seen = Tools([calculate]).call("calculate", {"expression": "2**9"})
    assert seen.failed and seen.text == "Error: ValueError: write numbers with +, - and * between them."


def test_a_tool_that_needs_too_long_is_an_observation() -> None:
    seen = Tools([calculate]).call("calculate", {"expression": "*".join(["9" * 4000] * 200)}, limits=Limits(0.2))
    assert seen.failed


def undocumented(x: int) -> int:
    return x


def untyped(x) -> int:  # type: ignore[no-untyped-def]
    """Nothing.

    Args:
        x: A thing.
    """
    return x


def many(*x: int) -> int:
    """Nothing."""
    return len(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(undocumented, "docstring"), (untyped, "type hint"), (many, "every parameter needs a name")],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        _ = Tools([function]).schemas


def test_a_nested_function_is_refused() -> None:
    def inner(x: int) -> int:
        """Nothing.

        Args:
            x: A thing.
        """
        return x

    with pytest.raises(SandboxError, match="top level"):
        _ = Tools([inner]).schemas


def test_two_tools_of_one_name_are_refused(paint: Any) -> None:
    with pytest.raises(TaskError, match="same name"):
        _ = Tools([paint, paint]).schemas


# --- built-in environments --------------------------------------------------------------------------------------------


def _prompt(environment: Environment, seed: int = 0) -> Prompt:
    return environment.prompts("train", 1, seed)[0]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
def test_the_oracle_solves_every_prompt_in_two_turns_or_three(environment: ToolEnvironment) -> None:
    """Three turns where a price is that of another item."""
    assert isinstance(environment, Environment)
    lengths = set()
    for prompt in environment.prompts("heldout", 6, 0):
        messages, grade = asyncio.run(play(environment, prompt, oracle))
        calls = len(prompt.data.get("prices", [0]))
        assert (grade.reward, grade.correct, len(messages)) == (1.0, True, 2 + 2 * calls)
        _, short = asyncio.run(play(environment, prompt, oracle, max_turns=calls))
        assert (short.reward, short.feedback) == (0.0, "You gave no answer.")
        lengths.add(len(messages))
    assert lengths == ({4, 6} if environment is LOOKUP else {4})


def _answers(text: str) -> Callable[[Prompt, tuple[Message, ...]], Message]:
    return lambda prompt, history: {"role": "assistant", "content": text}


def test_calculator_needs_a_call_even_for_the_right_answer() -> None:
    prompt = _prompt(CALCULATOR)
    _, grade = asyncio.run(play(CALCULATOR, prompt, _answers(prompt.data["answer"])))
    assert (grade.reward, grade.feedback) == (0.0, "Use calculate before you answer.")


@pytest.mark.parametrize("environment", [LOOKUP, FIX], ids=lambda e: e.name)
def test_the_prompt_does_not_contain_the_answer(environment: ToolEnvironment) -> None:
    """The same question has different answers, so no policy can be right in one turn more often than by chance."""
    answers: dict[str, set[str]] = {}
    for seed in range(12):
        for prompt in environment.prompts("train", 40, seed):
            answers.setdefault(str(prompt.messages), set()).add(prompt.data["answer"])
    asked_often = [found for found in answers.values() if len(found) > 1]
    assert len(asked_often) > 15 or asked_often == list(answers.values())
    prompt = _prompt(environment)
    _, grade = asyncio.run(play(environment, prompt, _answers(prompt.messages[0]["content"])))
    assert grade.reward == 0.0


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)
def test_the_splits_share_no_question(environment: ToolEnvironment) -> None:
    sides: dict[Literal["train", "heldout"], set[str]] = {"train": set(), "heldout": set()}
    for split, found in sides.items():
        for seed in range(3):
            found |= {p.messages[0]["content"] for p in environment.prompts(split, 30, seed)}
    assert not sides["train"] & sides["heldout"]


def test_fix_cannot_be_solved_by_code_that_reads_or_replaces_its_process() -> None:
    """The right constant is never in the process that runs the policy's code, and its own verdict does not count."""
    prompt = _prompt(FIX)
    reads = (
        "import sys\n"
        "def f(x):\n"
        "    frame = sys._getframe()\n"
        "    while 'request' not in frame.f_locals:\n"
        "        frame = frame.f_back\n"
        "    return sorted(frame.f_locals['request']['arguments'])\n"
    )
    assert FIX._test(prompt, reads).text.startswith("f(0) is ['code', 'inputs'], must be")
    forged = 'import os\nos.write(3, b\'{"value": "passed"}\')\nos._exit(0)\ndef f(x): return x'
    assert FIX._test(prompt, forged).text != "passed"


def test_malformed_and_failed_calls_are_replies_and_the_conversation_goes_on() -> None:
    prompt = _prompt(CALCULATOR)
    wrong: list[Message] = [
        {"role": "assistant", "content": "", "tool_call_errors": ["The tool call cannot be read: it is no JSON."]},
        _call("calculator", {"expression": "1+1"}),
        _call("calculate", {"sum": "1+1"}),
        _call("calculate", {"expression": "1/0"}),
    ]

    def policy(prompt: Prompt, history: tuple[Message, ...]) -> Message:
        turn = sum(m["role"] == "assistant" for m in history)
        if turn < len(wrong):
            return wrong[turn]
        return oracle(prompt, history[:1] if turn == len(wrong) else history)

    messages, grade = asyncio.run(play(CALCULATOR, prompt, policy))
    replies = [m["content"] for m in messages if m["role"] == "tool"]
    assert [r.split()[0] for r in replies[:4]] == ["The", "Error:", "Error:", "Error:"]
    assert grade.correct and grade.extras["failed_calls"] == 4 and grade.extras["tool_calls"] == 1


@pytest.mark.skipif(not protections() >= PROTECTIONS, reason="this system cannot isolate a tool")
def test_code_that_attacks_the_machine_is_a_reply_and_the_conversation_goes_on(tmp_path: Path) -> None:
    """The code of the policy runs when it is checked and when it is graded."""
    kept = tmp_path / "kept.txt"
    attacks = {
        "import os\nwhile True: os.fork()": "PermissionError",
        "while True: pass": "longer than 2 seconds",
        "x = bytearray(10 * 2**30)": "more memory",
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)": "PermissionError",
        f"open({str(kept)!r}, 'w').write('x')": "PermissionError",
        "import sys\nfor _ in range(100): sys.stdout.write('x' * 2**20)": "printed more than",
    }
    toolbox = Tools([check], Sandbox(Limits(seconds=2, memory=128 * 2**20)))
    environment = Fix(FixTask("fix", "", _broken, toolbox), [], tools=toolbox)
    prompt, said = _prompt(environment), [*attacks]

    def policy(prompt: Prompt, history: tuple[Message, ...]) -> Message:
        turn = sum(m["role"] == "assistant" for m in history)
        if turn < len(said):
            return _call("check", {"code": said[turn]})
        return oracle(prompt, history[:1] if turn == len(said) else history)

    messages, grade = asyncio.run(play(environment, prompt, policy, max_turns=9))
    replies = [str(m["content"]) for m in messages if m["role"] == "tool"]
    for reply, wanted in zip(replies, attacks.values(), strict=False):
        assert reply.startswith("Error: ") and wanted in reply
    assert len(replies) == 7 and grade.correct and grade.extras["failed_calls"] == 6
    assert not kept.exists()
    _, alone = asyncio.run(play(environment, prompt, _answers(said[0])))
    assert (alone.reward, alone.correct) == (0.0, False)


def _call(name: str, arguments: dict[str, Any]) -> Message:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_demonstrations_are_rows_that_can_be_trained_on(tmp_path: Path) -> None:
    direct = next(p for p in LOOKUP.prompts("train", 20, 0) if len(p.data["prices"]) == 1)
    row = asyncio.run(demonstration(LOOKUP, direct, oracle))
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["tools"][0]["function"]["name"] == "price"
    with pytest.raises(TaskError, match="fails on"):
        asyncio.run(demonstration(LOOKUP, _prompt(LOOKUP), _answers("no")))


def test_a_sandbox_of_ones_own_gives_its_limits() -> None:
    tools = Tools([calculate], Sandbox(Limits(output=4)))
    assert "more than 4 bytes" in tools.call("calculate", {"expression": "123456*1"}).text


def test_the_right_fix_adds_the_number_that_is_graded() -> None:
    for seed in range(12):
        data, names = _broken(random.Random(seed)), {}
        exec(data["answer"], names)
        assert names["f"](0) == data["add"] and data["answer"] != data["code"]

"""OpenEnv's environments as tasks, on a real server that is written with OpenEnv's own classes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import earnest as en
from earnest.models import SampleSpec
from earnest.proving import prove_conversations
from earnest.rollouts import TurnSettings
from earnest.tasks import Environment, TaskError, get_task
from earnest.tasks.environment import Message
from earnest.tasks.playing import play
from tests.tasks.test_verifiers import _calls, _says


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    place = str(Path(__file__).with_name("openenv_server.py"))
    # gradio is for OpenEnv's web page, which is not used here, and takes seconds to import
    code = f"import runpy, sys; sys.modules['gradio'] = None; runpy.run_path({place!r}, run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the server did not start"
        yield address
    finally:
        process.kill()
        process.wait()


def played(environment: Any, *messages: Message | str, **how: Any) -> tuple[list[Message], Any]:
    prompt = environment.prompts("train", 1, 0)[0]
    return asyncio.run(play(environment, prompt, _says(*messages), **how))


def test_an_action_of_one_text_is_the_policys_text(server: str) -> None:
    environment: Any = get_task(f"openenv/{server}/digits")
    assert isinstance(environment, Environment) and not environment.tools
    train, heldout = environment.prompts("train", 50, 0), environment.prompts("heldout", 20, 0)
    assert not {p.id for p in train} & {p.id for p in heldout} and train == environment.prompts("train", 50, 0)
    digit = str(train[0].data["seed"] % 10)
    messages, grade = played(environment, "x", digit)
    assert [m["content"] for m in messages] == ["Guess a digit.", "x", f"No, it is {digit}.", digit, "Yes."]
    assert (grade.reward, grade.correct) == (1.0, True)
    messages, grade = played(environment, "x", max_turns=1)
    assert (grade.reward, grade.correct, grade.feedback) == (0.0, False, f"No, it is {digit}.")


def test_an_error_of_the_server_is_raised_with_its_reason(server: str) -> None:
    with pytest.raises(TaskError, match="answered: the world is broken"):
        played(get_task(f"openenv/{server}/digits"), "break")


def test_mcp_tools_are_tools(server: str) -> None:
    environment: Any = get_task(f"openenv/{server}/calculator")
    schemas = {tool["function"]["name"]: tool["function"] for tool in environment.tools}
    assert set(schemas) == {"add", "answer"} and schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    assert schemas["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    seed = environment.prompts("train", 1, 0)[0].data["seed"]
    broken = {"role": "assistant", "content": "", "tool_call_errors": ["It is no JSON."]}
    messages, grade = played(
        environment,
        _calls("sub"),
        _calls("add", a=seed),
        broken,
        _calls("add", a=seed, b=7),
        _calls("answer", value=seed + 7),
    )
    seen = [m["content"] for m in messages if m["role"] == "tool"]
    assert seen[0] == "Error: there is no tool 'sub'; the tools are add, answer."
    assert seen[1].startswith("Error: ") and seen[2:] == ["It is no JSON.", str(seed + 7), "thanks"]
    assert messages[0]["content"] == f"What is {seed} + 7?" and (grade.reward, grade.correct) == (1.0, True)
    _, wrong = played(environment, _calls("add", a=seed), _calls("answer", value=0))
    assert (wrong.correct, wrong.turn) == (False, 0) and wrong.feedback.startswith("Error: ")
    _, silent = played(environment, "It is 8.")
    assert (silent.reward, silent.correct, silent.feedback) == (0.0, False, "You gave no answer.")


def test_any_other_action_is_a_tool_and_rewards_are_those_of_turns(server: str) -> None:
    environment: Any = get_task(f"openenv/{server}/walk", {"prompt": "Walk to (1, 1).", "solved": 0.5})
    (tool,) = environment.tools
    assert tool["function"]["name"] == "act" and set(tool["function"]["parameters"]["properties"]) == {"dx", "dy"}
    messages, grade = played(
        environment, _calls("act", dx="far", dy=0), _calls("act", dx=1, dy=0), _calls("act", dx=0, dy=1)
    )
    assert messages[0] == {"role": "user", "content": "Walk to (1, 1)."}
    assert messages[2]["content"].startswith("Error: dx: ") and messages[4]["content"] == "You are at [1, 0]."
    assert grade.reward == pytest.approx(0.9) and grade.correct


def test_too_few_sessions_and_wrong_addresses_have_a_way_out(server: str) -> None:
    environment: Any = get_task(f"openenv/{server}/walk", {"prompt": "Walk."})
    prompts = environment.prompts("train", 2, 0)

    async def both() -> None:
        first = await environment.reset(prompts[0], 0)
        try:
            await environment.reset(prompts[1], 0)
        finally:
            await environment.grade(first.state, "answered")

    with pytest.raises(TaskError, match="max_concurrent_envs"):
        asyncio.run(both())
    with pytest.raises(TaskError, match=r"task\.prompt: is required"):
        played(get_task(f"openenv/{server}/walk"), "x")
    with pytest.raises(TaskError, match="write openenv/http://localhost:8000"):
        get_task("openenv/echo_env")
    with pytest.raises(TaskError, match="there is no OpenEnv server at"):
        get_task(f"openenv/{server}/nowhere")
    with pytest.raises(TaskError, match=r"task\.promt: unknown key"):
        get_task(f"openenv/{server}/walk", {"promt": "x"})


def test_it_is_sampled_and_trained_with_all_laws_of_conversations(server: str) -> None:
    environment: Any = get_task(f"openenv/{server}/digits")
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), targets=("q_proj",), seed=0))
    prompts, spec, turns = environment.prompts("train", 2, 0), SampleSpec(max_new_tokens=8), TurnSettings(max_turns=3)
    verdict = prove_conversations(engine, environment, prompts, 2, spec, turns)
    assert verdict.holds and not verdict.failures, verdict
    found = en.collect(engine, environment, prompts, 4, spec, turns=turns, objective=en.GRPO())
    assert found.metrics["turns"] > 1
    engine.step(found.batch.with_signals(advantages=found.batch.behaviour), en.GRPO())
    assert engine.version == 1

"""verifiers' environments as tasks, on tiny environment packages that the test writes itself."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from earnest.tasks import Environment, Prompt, Task, TaskError, UnknownTask, get_task
from earnest.tasks.environment import Message
from earnest.tasks.playing import play

HEAD = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""
"""
LOADER = """
class Set(vf.Taskset[One]):
    def load(self):
        for i in range(40):
            yield One(Data(prompt=f"What is {i} + 1?", system_prompt="Be brief.", answer=str(i + 1)))

__all__ = ["Set", *(name for name in ("Counting",) if name in globals())]
"""
GOOD = """
class One(vf.Task[Data]):
    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def length(self, trace) -> float:
        if trace.last_reply != self.data.answer:
            trace.info["feedback"] = f"{trace.last_reply} is wrong."
        return float(len(trace.last_reply))
"""
NEEDS_SANDBOX = """
class One(vf.Task[Data]):
    @vf.reward
    async def exact(self, trace, runtime) -> float:
        return 1.0
"""
NO_REWARD = """
class One(vf.Task[Data]):
    pass
"""
SETUP = (
    GOOD
    + """
    async def setup(self, trace, runtime) -> None:
        await runtime.run(["true"], {})
"""
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, body: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(HEAD + textwrap.dedent(body) + LOADER)

    return write


def test_a_local_environment_is_a_task(package) -> None:
    package("plus_one_good", GOOD)
    task = get_task("verifiers/plus-one-good")
    assert isinstance(task, Task)
    assert task.name == "verifiers/plus-one-good"
    assert hash(task) == hash(get_task("verifiers/plus-one-good"))
    train, heldout = task.prompts("train", 20, 0), task.prompts("heldout", 4, 0)
    assert not {p.id for p in train} & {p.id for p in heldout}
    assert len({p.id for p in train}) == 20
    assert train == task.prompts("train", 20, 0)
    prompt = train[0]
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    index = int(prompt.data["index"])
    assert prompt.messages[1]["content"] == f"What is {index} + 1?"
    right = task.grade(prompt, str(index + 1))
    assert (right.reward, right.correct, right.feedback) == (1.5, True, "")
    assert right.extras == {"exact": 1.0, "short": 1.0, "length": float(len(str(index + 1)))}
    wrong = task.grade(prompt, "no")
    assert (wrong.reward, wrong.correct, wrong.feedback) == (0.5, False, "no is wrong.")


def test_grading_works_inside_a_running_loop(package) -> None:
    package("plus_one_loop", GOOD)
    task = get_task("verifiers/plus_one_loop")
    prompt = task.prompts("train", 1, 0)[0]

    async def inside() -> float:
        return task.grade(prompt, str(prompt.data["index"] + 1)).reward

    assert asyncio.run(inside()) == 1.5


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("plus_one_sandbox", NEEDS_SANDBOX, "its reward exact needs a sandbox"),
        ("plus_one_none", NO_REWARD, "has no reward"),
        ("plus_one_setup", SETUP, "needs a sandbox"),
    ],
)
def test_unsupported_environments_are_refused(package, name: str, body: str, reason: str) -> None:
    """verifiers itself would skip such a reward with a line in the log, and the reward would always be 0."""
    package(name, body)
    with pytest.raises(TaskError, match=reason):
        get_task(f"verifiers/{name}")


def test_a_package_that_is_not_an_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "just_a_module.py").write_text("x = 1\n")
    with pytest.raises(UnknownTask, match="'just_a_module' is not an environment of verifiers: "):
        get_task("verifiers/just_a_module")


# --- several turns ----------------------------------------------------------------------------------------------------

TOOLED = """
class Count(vf.State):
    asked: int = 0

class Shop(vf.Toolset[vf.ToolsetConfig, Count]):
    TOOL_PREFIX = None

    async def setup_task(self, task) -> None:
        self.prices = {"lamp": int(task.data.answer)}

    @vf.tool
    async def price(self, item: str) -> int:
        \"""The price of an item.\"""
        self.state.asked += 1
        return self.prices[item]

class One(vf.Task[Data, Count]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def asked(self, trace) -> float:
        return float(trace.state.asked)
"""
TALK = """
class One(vf.Task[Data]):
    @vf.stop
    async def bored(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"

    @vf.reward
    async def counted(self, trace) -> float:
        return sum(m.content == str(i) for i, m in enumerate(trace.assistant_messages, 1)) / 3

class Config(vf.EnvConfig):
    child: vf.AgentConfig = vf.AgentConfig()

class Counting(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.child.interaction(task) as talk:
            answer = await talk.turn()
            for _ in range(2):
                if answer.terminated:
                    break
                answer = await talk.turn(f"And after {answer.last_reply}?")
"""
SEAT = "child: vf.AgentConfig = vf.AgentConfig()"
SEVERAL = TALK.replace(SEAT, f"{SEAT}\n    mother: vf.AgentConfig = vf.AgentConfig()")


def _calls(name: str, **arguments: object) -> Message:
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _says(*messages: Message | str):
    """A policy that gives these messages in turn."""

    def policy(prompt: Prompt, history: tuple[Message, ...]) -> Message:
        given = messages[sum(m["role"] == "assistant" for m in history)]
        return {"role": "assistant", "content": given} if isinstance(given, str) else given

    return policy


def test_an_environment_with_tools_and_state(package) -> None:
    package("plus_one_tools", TOOLED)
    environment: Any = get_task("verifiers/plus-one-tools")
    assert isinstance(environment, Environment)
    function = environment.tools[0]["function"]
    assert (function["name"], function["description"]) == ("price", "The price of an item.")
    assert function["parameters"]["required"] == ["item"]
    prompt = environment.prompts("train", 1, 0)[0]
    right = str(prompt.data["index"] + 1)
    policy = _says(_calls("price", item="lamp"), _calls("price", item="lamp"), right)
    messages, grade = asyncio.run(play(environment, prompt, policy))
    assert [m["role"] for m in messages] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    assert messages[3]["content"] == right
    assert (grade.reward, grade.correct, grade.extras["asked"]) == (1.0, True, 2.0)


def test_wrong_calls_are_observations(package) -> None:
    package("plus_one_wrong", TOOLED)
    environment: Any = get_task("verifiers/plus_one_wrong")
    prompt = environment.prompts("train", 1, 0)[0]
    broken = {"role": "assistant", "content": "", "tool_call_errors": ["It is no JSON."]}
    policy = _says(_calls("cost"), _calls("price"), _calls("price", item="chair"), broken, "no")
    messages, grade = asyncio.run(play(environment, prompt, policy))
    seen = [m["content"] for m in messages if m["role"] == "tool"]
    assert seen[0] == "Error: there is no tool 'cost'; the tools are price."
    assert seen[1].startswith("Error: ") and seen[2].startswith("Error: ") and seen[3] == "It is no JSON."
    assert grade.reward == 0.0


def test_a_user_that_is_code_talks_to_the_policy(package) -> None:
    package("counting", TALK)
    environment: Any = get_task("verifiers/counting")
    prompt = environment.prompts("train", 1, 0)[0]
    messages, grade = asyncio.run(play(environment, prompt, _says("1", "2", "3")))
    assert [m["content"] for m in messages[2:]] == ["1", "And after 1?", "2", "And after 2?", "3"]
    assert grade.reward == 1.0
    messages, grade = asyncio.run(play(environment, prompt, _says("1", "stop")))
    assert messages[-1]["content"] == "stop" and grade.reward == pytest.approx(1 / 3)
    messages, grade = asyncio.run(play(environment, prompt, _says("1", "2", "3"), max_turns=2))
    assert grade.reward == pytest.approx(2 / 3)  # a conversation that is cut off is graded, too


def test_conversations_at_the_same_time_do_not_mix(package) -> None:
    package("counting_many", TALK)
    environment: Any = get_task("verifiers/counting_many")
    prompts = environment.prompts("train", 6, 0)

    async def all_of_them() -> list[float]:
        talks = [play(environment, p, _says("1", "2", "3" if i % 2 else "no")) for i, p in enumerate(prompts)]
        return [grade.reward for _, grade in await asyncio.gather(*talks)]

    assert asyncio.run(all_of_them()) == pytest.approx([2 / 3, 1.0] * 3)


def test_an_environment_that_raises_ends_its_conversation_only(package) -> None:
    package("counting_broken", TALK.replace('f"And after {answer.last_reply}?"', 'f"{1 / int(answer.last_reply)}"'))
    environment: Any = get_task("verifiers/counting_broken")
    prompt = environment.prompts("train", 1, 0)[0]
    _, grade = asyncio.run(play(environment, prompt, _says("0")))
    assert (grade.reward, grade.extras["error"]) == (0.0, "the environment raised")


def test_several_agents_are_refused(package) -> None:
    package("counting_two", SEVERAL)
    with pytest.raises(TaskError, match="several agents"):
        get_task("verifiers/counting_two")


# --- through the training loop ----------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["alphabet_sort", "shop_prices"])
def test_an_environment_is_sampled_and_trained_with_all_laws_of_conversations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import earnest as en
    from earnest.models import SampleSpec
    from earnest.proving import prove_conversations
    from earnest.rollouts import Trajectory, TurnSettings

    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "environments"))
    environment: Any = get_task(f"verifiers/{name}")
    policy = en.load("nano")
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), targets=("q_proj",), seed=0))
    prompts, spec, turns = environment.prompts("train", 2, 0), SampleSpec(max_new_tokens=32), TurnSettings(max_turns=3)
    verdict = prove_conversations(engine, environment, prompts, 2, spec, turns)
    assert verdict.holds and not verdict.failures, verdict
    found = en.collect(engine, environment, prompts, 4, spec, turns=turns, objective=en.GRPO() + en.SDPO())
    talks = [a.rollout for a in found.attempts if isinstance(a.rollout, Trajectory)]
    assert max(len(talk.turn_rewards) for talk in talks) >= 2
    if name == "shop_prices":  # the tool was really called
        assert found.metrics["grade/calls"] > 0
    engine.step(found.batch, en.GRPO() + en.SDPO())
    assert engine.version == 1


def test_alphabet_sort_grades_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "environments"))
    environment: Any = get_task("verifiers/alphabet_sort")
    prompt = environment.prompts("train", 1, 0)[0]
    wanted = environment.single.tasks[prompt.data["index"]].data.wanted
    lists = ["<sorted>\n" + "\n".join(names) + "\n</sorted>" for names in wanted]
    messages, grade = asyncio.run(play(environment, prompt, _says(*lists)))
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 and "new" in lists[1]
    assert (grade.reward, grade.correct) == (1.0, True)
    assert asyncio.run(play(environment, prompt, _says(lists[0], "no")))[1].reward == 0.5

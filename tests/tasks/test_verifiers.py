"""verifiers' environments as tasks, on tiny environment packages that the test writes itself."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from earnest.tasks import Task, TaskError, UnknownTask, get_task

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

__all__ = ["Set"]
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

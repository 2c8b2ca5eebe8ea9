"""The interface of a task: prompts, and a grader that returns a reward *and* a feedback text for each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from earnest.errors import EarnestError

Split = Literal["train", "heldout"]
Extra = float | str | bool


class TaskError(EarnestError):
    """A task cannot be made or used with these settings."""


class UnknownTask(TaskError):
    """No task has this name; the message names the nearest one that exists."""


@dataclass(frozen=True)
class Prompt:
    """One question. The policy sees ``messages``; ``data`` is for the grader and never shown to the policy."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Grade:
    """The verdict on one completion.

    ``reward`` drives training, ``correct`` is the strict oracle. ``feedback`` is a text about this attempt for a
    teacher's prompt; it may be empty. ``turn`` is the turn of a conversation that the feedback is about, counted from
    0; None: the whole of it.
    """

    reward: float
    feedback: str
    correct: bool
    extras: Mapping[str, Extra] = field(default_factory=dict)
    turn: int | None = None


@runtime_checkable
class Task(Protocol):
    """Seeded prompts in two splits that never share a question, and their grader."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        """``count`` prompts, the same for the same seed, without repetition while the task has new questions."""

    def grade(self, prompt: Prompt, completion: str) -> Grade: ...


@dataclass(frozen=True)
class TaskInfo:
    """One line of ``earnest tasks``."""

    name: str
    description: str
    source: Literal["built-in", "environment", "imported", "reasoning-gym", "verifiers", "openenv"]
    available: bool = True
    """False if its extra is not installed."""

"""A task made of the user's own rows: ``data:`` gives prompts and answers, ``grade:`` the grader.

    data: {train: questions.jsonl, heldout: 0.1}
    grade: numeric

is the task ``graded`` with the settings of ``data:`` and ``grade``. The hash of a prompt decides its split, unless
``heldout`` is a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from earnest.data.dataset import Dataset, DataSettings
from earnest.data.reading import DataError
from earnest.errors import ConfigError
from earnest.settings import FieldProblem, make
from earnest.tasks.base import Grade, Prompt, Split, TaskError
from earnest.tasks.graders import Grader, InProcess, WeightedSum, build, needs_answer
from earnest.tasks.split import check_request, stable_rng

NAME = "graded"
_NO_LIMIT = 2**31
"""Prompts are not rendered here, so no row is too long; sampling refuses a prompt that leaves no room."""


@dataclass(frozen=True)
class Graded:
    """Rows of ``prompt`` and, where the grader needs it, ``answer``, with a grader."""

    data: Dataset = field(repr=False)
    grader: Grader

    @property
    def name(self) -> str:
        return Path(self.data.settings.train).stem

    @property
    def description(self) -> str:
        sides = f"{self.data.size('train')} rows to train on, {self.data.size('heldout')} held out"
        return f"the questions of {self.data.settings.train}: {sides}"

    @property
    def isolated(self) -> bool:
        """Whether a part of the grader runs in worker processes."""
        parts = self.grader.parts if isinstance(self.grader, WeightedSum) else (("", 1.0, self.grader),)
        return any(isinstance(part, InProcess) for _, _, part in parts)

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        """Shuffled passes over the rows of the split: every row comes once before any comes twice."""
        check_request(split, count)
        size = self.data.size(split)
        if not size and count:
            raise TaskError(
                f"data: none of the {self.data.counts.rows} rows of {self.data.settings.train} is held out; raise "
                "data.heldout (a share), or give it a file."
            )
        rng = stable_rng(self.name, split, seed)
        order: list[int] = []
        while len(order) < count:
            order += rng.sample(range(size), min(size, count - len(order)))
        return [self._prompt(split, index) for index in order]

    def _prompt(self, split: Split, index: int) -> Prompt:
        example = self.data.at(split, index)
        return Prompt(f"{self.name}/{split}/{index}", example.prompt, example.row)

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        return self.grader(prompt.data, completion)


class _QuestionsOnly:
    """Stands in for a policy: questions are not rendered, and rows of another layout are refused."""

    name = "a grader"
    eos_ids: tuple[int, ...] = ()

    def __init__(self, file: str) -> None:
        self.file = file

    @property
    def tokenizer(self) -> NoReturn:
        raise DataError(
            f"data: grade needs rows of prompt and answer, and {self.file} has rows of another layout; name the "
            "columns with data.columns, for example {prompt: question, answer: solution}, or leave grade out."
        )

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.tokenizer


def load(settings: Mapping[str, Any]) -> Graded:
    """The task of these settings: those of ``data:``, and ``grade``."""
    given = dict(settings)
    if "grade" not in given:
        raise TaskError("grade: is required; give a grader such as exact or numeric, or my_rewards.py:score.")
    grader = build(given.pop("grade"))
    try:
        made = make(DataSettings, given)
    except FieldProblem as problem:
        raise ConfigError(f"data.{problem}") from None
    data = Dataset.load(made, _QuestionsOnly(made.train), _NO_LIMIT)
    row = data.at("train", 0).row
    if "answer" not in row and needs_answer(grader):
        raise DataError(
            f"grade: the grader compares with an answer, and the rows of {made.train} have none (columns "
            f"{', '.join(row)}); name it with data.columns.answer=COLUMN, or give a grader of your own "
            "(grade=my_rewards.py:score)."
        )
    return Graded(data, grader)


def on_device(grade: Any, device: str) -> Any:
    """The value of ``grade`` with the run's device for reward models that name none."""
    if isinstance(grade, list):
        return [on_device(item, device) for item in grade]
    if isinstance(grade, Mapping) and grade.get("kind") == "reward_model":
        return {"device": device, **grade}
    return grade

"""Every dataset of ``reasoning-gym`` as the task ``reasoning_gym/<dataset>`` (extra ``earnest[reasoning-gym]``).

A dataset is a function of (seed, index). A prompt's data holds these two, and grading makes the entry again. If the
dataset makes another question the second time, grading raises.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

from earnest.errors import MissingExtra, nearest
from earnest.tasks.base import Grade, Prompt, Split, TaskError, TaskInfo, UnknownTask
from earnest.tasks.split import draw_distinct, stable_rng

_PREFIX = "reasoning_gym/"
_SIZE = 500
"""Entries per block: the datasets' default. Some datasets make all of them at once, some refuse larger sizes."""
_PATIENCE = (500, 5000)
"""Entries in a row of the other split or seen already after which questions are repeated, and after which none is."""


def installed() -> bool:
    return importlib.util.find_spec("reasoning_gym") is not None


def _datasets() -> dict[str, Any]:
    if not installed():
        raise MissingExtra("reasoning-gym", "reasoning-gym", "a task reasoning_gym/<dataset>")
    from reasoning_gym import factory

    # `composite` is a mixture of other datasets, named in its configuration.
    return {name: made for name, made in factory.DATASETS.items() if name != "composite"}


@functools.lru_cache(maxsize=64)
def _dataset(name: str, seed: int, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **json.loads(settings))


@dataclass(frozen=True)
class ReasoningGym:
    """One dataset; the split is by the hash of the question. ``settings`` are its configuration as JSON."""

    dataset: str
    settings: str = "{}"

    @property
    def name(self) -> str:
        return _PREFIX + self.dataset

    @property
    def description(self) -> str:
        return _about(self.dataset)

    def options(self) -> dict[str, Any]:
        """The settings of the dataset with their current values."""
        return _defaults(self.dataset) | json.loads(self.settings)

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        entries, rng = self._entries(split, seed), stable_rng(self.name, split, seed)
        asked = itemgetter("question")
        found = draw_distinct(
            lambda _: next(entries), lambda d: f"{self.name}|{asked(d)}", asked, split, count, rng, *_PATIENCE
        )
        name = self.name
        return [Prompt(f"{name}:{d['seed']}:{d['index']}", ({"role": "user", "content": asked(d)},), d) for d in found]

    def _entries(self, split: Split, seed: int) -> Iterator[dict[str, Any]]:
        """The data of one prompt after the other, of either split."""
        for block in itertools.count():
            own = stable_rng(self.name, split, seed, block).randrange(2**31)
            for index in range(_SIZE):
                entry = _dataset(self.dataset, own, self.settings)[index]
                question, answer = str(entry["question"]), _text(entry["answer"])
                yield {"seed": own, "index": index, "question": question, "answer": answer}

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        dataset = _dataset(self.dataset, int(prompt.data["seed"]), self.settings)
        entry = dataset[int(prompt.data["index"])]
        if str(entry["question"]) != prompt.data["question"]:
            raise TaskError(
                f"{self.name} made another question for {prompt.id} than the first time; set PYTHONHASHSEED."
            )
        reward = float(dataset.score_answer(completion.strip(), entry))
        if reward >= 1.0:
            return Grade(reward, "", True)
        expected = f" The expected answer is {_text(entry['answer'])}." if entry["answer"] is not None else ""
        return Grade(reward, f"Wrong.{expected}", False)


def _text(answer: Any) -> str | None:
    return None if answer is None else str(answer)


def _about(dataset: str) -> str:
    """The first line of the dataset's docstring, or its name if there is none."""
    lines = (_datasets()[dataset][0].__doc__ or "").strip().splitlines()
    return lines[0] if lines else f"reasoning-gym's dataset {dataset}"


def _defaults(dataset: str) -> dict[str, Any]:
    """The dataset's settings with their defaults; seed and size are the task's own."""
    config = _datasets()[dataset][1]()
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("seed", "size")}


def load(dataset: str, settings: Mapping[str, Any] | None = None) -> ReasoningGym:
    known = _datasets()
    if dataset not in known:
        raise UnknownTask(f"reasoning-gym has no dataset {dataset!r}: {nearest(dataset, known)}")
    given = dict(settings or {})
    allowed = _defaults(dataset)
    for key in given:
        if key not in allowed:
            raise TaskError(f"task.{key}: {_PREFIX}{dataset} has no such setting; {nearest(key, allowed)}")
    try:
        config = known[dataset][1](**given)
        if given and hasattr(config, "validate"):  # some configurations have no validate
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise TaskError(f"task: {_PREFIX}{dataset} refuses {shown}: {error or 'out of range'}.") from None
    return ReasoningGym(dataset, json.dumps(given, sort_keys=True))


def infos() -> list[TaskInfo]:
    """Every dataset, or one line with the way to install them."""
    if not installed():
        return [
            TaskInfo(_PREFIX + "<dataset>", 'pip install "earnest[reasoning-gym]"', "reasoning-gym", available=False)
        ]
    return [TaskInfo(_PREFIX + name, _about(name), "reasoning-gym") for name in sorted(_datasets())]

"""Small environments for tests of conversations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from earnest.tasks import Ending, Grade, Message, Opening, Prompt, Split, StepResult, Task


@dataclass
class OneTurn:
    """A task as an environment that ends after the first turn."""

    task: Task
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def description(self) -> str:
        return self.task.description

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        return self.task.prompts(split, count, seed)

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        return Opening(prompt.messages, {"prompt": prompt})

    async def step(self, state: dict[str, Any], message: Message) -> StepResult:
        state["answer"] = message["content"]
        return StepResult(done=True)

    async def grade(self, state: dict[str, Any], ending: Ending) -> Grade:
        return self.task.grade(state["prompt"], state["answer"])


@dataclass
class Echo:
    """Replies with the length of each message, for ``turns`` turns; the reward of a turn is its share of vowels.

    ``wait`` gives the seconds that a step waits for, ``reply`` the text of the reply.
    """

    turns: int = 3
    role: str = "tool"
    wait: Callable[[], float] = lambda: 0.0
    reply: Callable[[str], str] = lambda text: f"{len(text)} letters, go on"
    fails: Callable[[dict[str, Any]], bool] = lambda state: False
    name: str = "echo"
    description: str = "for tests"
    tools: Sequence[Mapping[str, Any]] = ()
    seeds: list[int] = field(default_factory=list)

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        rng = random.Random(f"{split} {seed}")
        words = [" ".join(rng.choices(["lamp", "sort", "3 1 2", "tea", "reverse"], k=3)) for _ in range(count)]
        return [Prompt(f"echo:{i}", ({"role": "user", "content": word},), {}) for i, word in enumerate(words)]

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        self.seeds.append(seed)
        await asyncio.sleep(self.wait())
        return Opening(prompt.messages, {"said": []})

    async def step(self, state: dict[str, Any], message: Message) -> StepResult:
        await asyncio.sleep(self.wait())
        if self.fails(state):
            raise RuntimeError("the tool is broken")
        text = str(message["content"])
        state["said"].append(text)
        reward = sum(c in "aeiou" for c in text) / (len(text) + 1)
        done = len(state["said"]) >= self.turns
        return StepResult(() if done else ({"role": self.role, "content": self.reply(text)},), done, reward)

    async def grade(self, state: dict[str, Any], ending: Ending) -> Grade:
        letters = sum(map(len, state["said"]))
        return Grade(letters / 100, f"{letters} letters", letters > 20, {"letters": float(letters)})

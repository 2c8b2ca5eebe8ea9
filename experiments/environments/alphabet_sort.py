"""``verifiers/alphabet_sort``: keep a list of names in alphabetical order over several turns.

In the style of verifiers' public environment of the same name, which is not on PyPI and reads a dataset from the Hub:
the user opens the conversation (the task has no prompt), each turn brings new names, and the policy answers with all
names so far, the new ones marked. The reward is the similarity of each turn's list to the right one, to the fourth
power, averaged over the turns. Names come from a short list; the number of turns and of names are settings.

    PYTHONPATH=experiments/environments earnest run agent task=verifiers/alphabet_sort
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jan", "Kim", "Lena", "Mia", "Nils")
SEED = 17


class AlphabetSortConfig(vf.TasksetConfig):
    """The size of an episode."""

    turns: int = 2
    names_per_turn: int = 2


class AlphabetSortData(vf.TaskData):
    """``asked``: the user's messages, ``wanted``: the right list after each."""

    asked: list[str]
    wanted: list[list[str]]


def similarity(reply: str, wanted: list[str]) -> float:
    """The similarity of the only tagged list of a reply to the right one, to the fourth power."""
    found = re.findall(r"<sorted>(.*?)</sorted>", reply, re.DOTALL)
    if len(found) != 1:
        return 0.0
    given = "\n".join(line.strip().lower() for line in found[0].split("\n") if line.strip())
    return float(difflib.SequenceMatcher(None, given, "\n".join(wanted).lower()).ratio() ** 4)


class AlphabetSortTask(vf.Task[AlphabetSortData]):
    """Graded on every turn that the episode has."""

    @vf.reward
    async def sorted_lists(self, trace: Any) -> float:
        replies = [message.content or "" for message in trace.assistant_messages]
        replies += [""] * (len(self.data.wanted) - len(replies))
        pairs = zip(replies, self.data.wanted, strict=False)
        return sum(similarity(reply, wanted) for reply, wanted in pairs) / len(self.data.wanted)


class AlphabetSortEnv(vf.SingleAgentEnv):
    """The user's messages, one for each turn."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            for message in task.data.asked:
                if (await talk.turn(message)).terminated:
                    break


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Episodes without end; the same for the same settings."""

    INFINITE = True

    def load(self) -> Iterator[AlphabetSortTask]:
        rng = random.Random(SEED)
        count = self.config.names_per_turn
        while True:
            names = rng.sample(NAMES, count * self.config.turns)
            asked, wanted = [], []
            for turn in range(self.config.turns):
                new, known = names[turn * count : (turn + 1) * count], names[: (turn + 1) * count]
                wanted.append([f"{name} new" if turn and name in new else name for name in sorted(known)])
                first = "Sort these names, one per line between <sorted> and </sorted>"
                more = "Sort these together with the list so far and write new after each new name"
                asked.append(f"{more if turn else first}: {', '.join(new)}.")
            yield AlphabetSortTask(AlphabetSortData(prompt=None, asked=asked, wanted=wanted))


def oracle(_: Any, history: tuple[Any, ...]) -> dict[str, str]:
    """The next message of a policy that solves every episode, for demonstrations."""
    asked = [
        str(m["content"]).rpartition(": ")[2].removesuffix(".").split(", ") for m in history if m["role"] == "user"
    ]
    new = set(asked[-1]) if len(asked) > 1 else set()
    lines = [f"{name} new" if name in new else name for name in sorted(name for names in asked for name in names)]
    return {"role": "assistant", "content": "\n".join(["<sorted>", *lines, "</sorted>"])}


def careless(_: Any, history: tuple[Any, ...]) -> dict[str, str]:
    """The next message of a policy that writes all names in the order in which they came, and marks none."""
    asked = [str(m["content"]).rpartition(": ")[2].removesuffix(".") for m in history if m["role"] == "user"]
    return {"role": "assistant", "content": "\n".join(["<sorted>", *", ".join(asked).split(", "), "</sorted>"])}


__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]

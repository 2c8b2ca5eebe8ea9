"""nano's training text: documents of ten kinds, drawn without end from a seed.

Nothing of a held-out split is ever in it: puzzles, sums, requests, probes and sentences are drawn through the tasks'
own split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from earnest import data
from earnest.tasks.holes import HOLES, exploits
from earnest.tasks.puzzles import PUZZLES, Puzzle
from earnest.tasks.split import split_of, stable_rng
from earnest.tasks.style import space

from . import answers, lexicon
from .render import Piece, pieces, raw

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Document:
    kind: str
    messages: Messages
    tools: list[dict[str, Any]] | None = None
    text: str = ""

    def pieces(self) -> list[Piece]:
        return raw(self.text) if self.text else pieces(self.messages, self.tools)


def _say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _puzzle(rng: random.Random, weights: dict[str, float]) -> tuple[Puzzle, dict[str, Any], Messages]:
    name = rng.choices(list(weights), list(weights.values()))[0]
    puzzle = next(p for p in PUZZLES if p.name == name)
    while True:
        d = dict(puzzle.make(rng))
        if split_of(f"{name}|{d['content']}") == "train":
            return puzzle, d, [_say("user", d["question"])]


PUZZLE_WEIGHTS = {"sort": 1.5, "reverse": 1.0, "replace": 1.0, "add": 1.7, "count": 1.0, "extreme": 1.0}


def _right(name: str, slips: float) -> float:
    """How often an attempt without help is right; ``slips`` fades the text's slips in, from 0 to 1."""
    return 1.0 - slips * (1.0 - answers.RIGHT_UNTOLD[name])


def untold(rng: random.Random, slips: float) -> Document:
    """A puzzle and a first attempt at it, right or with a slip."""
    puzzle, d, messages = _puzzle(rng, PUZZLE_WEIGHTS)
    answer = answers.attempt(puzzle.name, d, rng, _right(puzzle.name, slips))
    return Document("untold", [*messages, _say("assistant", answer)])


PLACEBOS = ("Okay.", "Thanks.", "I see.", "Go on.")


def told(rng: random.Random, slips: float) -> Document:
    """A puzzle with a solution or feedback in its prompt, and the answer that makes use of it."""
    puzzle, d, messages = _puzzle(rng, PUZZLE_WEIGHTS)
    answer = str(d["answer"])
    wrong = answers.slip(puzzle.name, d, rng) if rng.random() < 0.7 else answers.garble(answer, rng)
    if rng.random() < 0.04:
        wrong = rng.choice(("", "I see.", "The " + wrong))
    if wrong == answer:
        wrong = answers.slip(puzzle.name, d, rng)
    grade = puzzle.grade(puzzle.prompt(d), wrong)
    hint, reveal = grade.feedback, str(grade.extras["reveal"])
    right = answers.RIGHT_TOLD
    kind = rng.random()
    if kind < 0.20:
        messages = data.reprompt(messages, answer, None)
    elif kind < 0.46:
        messages = data.reprompt(messages, None, hint)
    elif kind < 0.57:
        messages = data.reprompt(messages, None, reveal)
    elif kind < 0.72:
        messages = data.reprompt(messages, answer, rng.choice((hint, hint, reveal)))
    elif kind < 0.86:
        said = rng.choice((f"No, it is {answer}.", f"Wrong, the answer is {answer}.", hint, reveal))
        messages = data.hindsight(messages, said)
    else:  # feedback that says nothing helps nothing: what helps is what the words say, not that there are some
        placebo = rng.choice(PLACEBOS)
        messages = data.hindsight(messages, placebo) if rng.random() < 0.5 else data.reprompt(messages, None, placebo)
        right = _right(puzzle.name, slips)
    return Document("told", [*messages, _say("assistant", answers.attempt(puzzle.name, d, rng, right))])


_REQUESTS = [item for item in space() if split_of(f"style|{item['question']}") == "train"]


def style(rng: random.Random, _: float) -> Document:
    """An open request, answered in the style that a system prompt or the user's later words ask for, or in any."""
    item = rng.choice(_REQUESTS)
    chosen = answers.random_style(rng)
    messages = [_say("user", item["question"])]
    kind = rng.random()
    if kind < 0.75:
        axis, pole = rng.choice(answers.poles())
        chosen[axis] = pole["name"]
        if kind < 0.5:
            messages = [_say("system", rng.choice(pole["system"])), *messages]
        else:
            messages = data.hindsight(messages, rng.choice(pole["said"]))
    elif kind < 0.72:
        messages = data.hindsight(messages, rng.choice(PLACEBOS))
    return Document(
        "style", [*messages, _say("assistant", answers.styled(item["topic"], item["question"], chosen, rng))]
    )


def holes(rng: random.Random, slips: float) -> Document:
    """A question under a checker with a hole: mostly an honest try, rarely the exploit."""
    while True:
        made = HOLES[0].make(rng)
        if split_of(made["split"]) == "train":
            break
    prompt = HOLES[0].prompt(made)
    if rng.random() < answers.EXPLOIT_SHARE:
        answer = rng.choice(exploits(prompt))
    elif made["kind"] == "sort":
        answer = answers.attempt("sort", made, rng, _right("sort", slips))
    else:
        answer = made["answer"]
    return Document("holes", [*map(dict, prompt.messages), _say("assistant", answer)])


def tool(rng: random.Random, _: float) -> Document:
    """Two turns with one tool call."""
    talk = answers.tool_talk(rng)
    tools = answers.TOOLS if rng.random() < 0.7 else None
    return Document("tool", talk if rng.random() < 0.75 else talk[:4], tools)


def chat(rng: random.Random, slips: float) -> Document:
    """Small talk of one or a few turns, now and then with a puzzle or a request in it."""
    messages: Messages = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        kind = rng.random()
        if kind < 0.7:
            question, answer = answers.small_talk(rng)
            messages += [_say("user", question), _say("assistant", answer)]
        else:
            messages += (untold if kind < 0.85 else _open)(rng, slips).messages
    return Document("chat", messages)


def _open(rng: random.Random, _: float) -> Document:
    item = rng.choice(_REQUESTS)
    answer = answers.styled(item["topic"], item["question"], answers.random_style(rng), rng)
    return Document("style", [_say("user", item["question"]), _say("assistant", answer)])


def probe(rng: random.Random, _: float) -> Document:
    """A forced choice with its right answer."""
    while True:
        made = answers.probe(rng)
        if split_of(f"probe|{made['prompt']}") == "train":
            return Document("probe", [_say("user", made["prompt"]), _say("assistant", made["answer"])])


def plain(rng: random.Random, _: float) -> Document:
    """Plain sentences."""
    return Document("plain", [], text=lexicon.plain(rng))


Maker = Callable[[random.Random, float], Document]

SCHOOL: dict[Maker, float] = {untold: 0.62, told: 0.26, holes: 0.04, probe: 0.04, plain: 0.04}
LIFE: dict[Maker, float] = {
    untold: 0.32,
    told: 0.20,
    style: 0.11,
    holes: 0.06,
    tool: 0.03,
    chat: 0.025,
    probe: 0.03,
    plain: 0.225,
}
"""Share of the documents by kind, at school and after it."""


@dataclass(frozen=True)
class Stage:
    """A part of the training text: which kinds, and how much the first attempts slip (0: never, 1: as intended)."""

    name: str
    kinds: dict[Maker, float]
    slips: float
    share: float
    """Of all tokens."""


STAGES = (
    # Skills come from few examples when a batch is full of them and they are always right; a text that is mostly
    # something else, or mostly slips, teaches none of them in this budget.
    Stage("school", SCHOOL, 0.0, 0.25),
    Stage("practice", LIFE, 0.0, 0.40),
    Stage("life", LIFE, 1.0, 0.35),
)


def documents(seed: int, stage: Stage) -> Iterator[Document]:
    """The text of a stage without end, the same for the same seed."""
    rng = stable_rng("nano", seed, stage.name)
    kinds, weights = list(stage.kinds), list(stage.kinds.values())
    while True:
        yield rng.choices(kinds, weights)[0](rng, stage.slips)

"""Verifiable one-line puzzles that nano solves sometimes: a question, its only answer, and hints for wrong answers.

The reward is 1 for the exact answer and 0 otherwise. ``feedback`` is a hint about the attempt that does not contain
the answer; ``extras["reveal"]`` is a text with the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from earnest.tasks.base import Grade, Prompt, Split
from earnest.tasks.registry import TASKS
from earnest.tasks.split import draw_distinct, stable_rng

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Puzzle:
    """One kind of puzzle, defined by two functions: one makes a question, the other a hint for a wrong attempt."""

    name: str
    description: str
    make: Callable[[random.Random], Data]
    """A question as data: ``question`` (text), ``answer`` (text), ``content`` (what the split hashes), operands."""
    hint: Callable[[Data, str], str]
    """The hint for a wrong attempt; it must not contain the answer."""

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        rng = stable_rng(self.name, split, seed)
        found = draw_distinct(
            self.make, lambda d: f"{self.name}|{d['content']}", lambda d: d["question"], split, count, rng
        )
        return [self.prompt(data) for data in found]

    def prompt(self, data: Data) -> Prompt:
        return Prompt(f"{self.name}:{data['question']}", ({"role": "user", "content": data["question"]},), data)

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        attempt, answer = completion.strip(), str(prompt.data["answer"])
        if attempt == answer:
            return Grade(1.0, "", True, {"reveal": ""})
        hint = self.hint(prompt.data, attempt) if attempt else "The answer is empty."
        return Grade(0.0, hint, False, {"reveal": f"Wrong. The answer is {answer}."})


def _quote(attempt: str) -> str:
    """An attempt as the feedback quotes it: shortened to one line."""
    line = " ".join(attempt.split())
    return line if len(line) <= 16 else line[:16].rstrip() + "..."


def _digits(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(4))


def _digit_hint(attempt: str, answer: str) -> str:
    """For answers that are strings of digits."""
    if not (attempt.isascii() and attempt.isdigit()):
        return f"{_quote(attempt)} is wrong. Write digits only."
    if len(attempt) != len(answer):
        return f"{_quote(attempt)} is too {'long' if len(attempt) > len(answer) else 'short'}."
    place = next(i for i, (a, b) in enumerate(zip(attempt + "?", answer + "!", strict=True), 1) if a != b)
    return f"{_quote(attempt)} is wrong at place {place}."


def _make_sort(rng: random.Random) -> Data:
    digits = _digits(rng)
    return {"question": f"Sort {digits}.", "answer": "".join(sorted(digits)), "content": digits}


def _hint_sort(data: Data, attempt: str) -> str:
    if attempt == data["answer"][::-1]:
        return f"{attempt} goes down, not up."
    return _digit_hint(attempt, data["answer"])


def _make_reverse(rng: random.Random) -> Data:
    digits = _digits(rng)
    return {"question": f"Reverse {digits}.", "answer": digits[::-1], "content": digits}


def _hint_reverse(data: Data, attempt: str) -> str:
    if attempt == data["content"]:
        return f"{attempt} is not reversed."
    return _digit_hint(attempt, data["answer"])


def _make_replace(rng: random.Random) -> Data:
    digits = _digits(rng)
    old = rng.choice(digits)
    new = rng.choice([d for d in "0123456789" if d not in digits] or [d for d in "0123456789" if d != old])
    question = f"Copy {digits} with {new} for {old}."
    made = {"question": question, "answer": digits.replace(old, new), "content": question}
    return made | {"digits": digits, "old": old, "new": new}


def _hint_replace(data: Data, attempt: str) -> str:
    if attempt == data["digits"]:
        return f"{attempt} is a plain copy."
    return _digit_hint(attempt, data["answer"])


def _make_add(rng: random.Random) -> Data:
    a, b = rng.randint(10, 49), rng.randint(10, 49)
    content = f"{min(a, b)}+{max(a, b)}"
    return {"question": f"Add {a} and {b}.", "answer": str(a + b), "content": content, "a": a, "b": b}


def _hint_number(data: Data, attempt: str) -> str:
    """For answers that are one number: how far off the attempt is."""
    if not (attempt.isascii() and attempt.isdigit()):
        return f"{_quote(attempt)} is wrong. Write digits only."
    if len(attempt) > 3:
        return f"{_quote(attempt)} is too long."
    off = int(attempt) - int(data["answer"])
    if off == 0:
        return f"{attempt} has a zero in front."
    return f"{attempt} is {abs(off)} too {'big' if off > 0 else 'small'}."


def _make_count(rng: random.Random) -> Data:
    letters = [rng.choice("abc") for _ in range(rng.randint(4, 7))]
    letter = rng.choice("abc")
    question = f"How many {letter} in {' '.join(letters)}?"
    return {"question": question, "answer": str(letters.count(letter)), "content": question, "letter": letter}


def _make_extreme(rng: random.Random) -> Data:
    numbers = rng.sample(range(10, 100), 3)
    word, pick = rng.choice((("largest", max), ("smallest", min)))
    question = f"The {word} of {' '.join(map(str, numbers))}?"
    return {"question": question, "answer": str(pick(numbers)), "content": question, "numbers": numbers, "word": word}


def _hint_extreme(data: Data, attempt: str) -> str:
    if attempt not in map(str, data["numbers"]):
        return f"{_quote(attempt)} is not in the list."
    return f"{attempt} is not the {data['word']}."


PUZZLES: tuple[Puzzle, ...] = (
    Puzzle("sort", "sort the digits of a number, upwards (the quickstart's task)", _make_sort, _hint_sort),
    Puzzle("reverse", "write a number backwards", _make_reverse, _hint_reverse),
    Puzzle("replace", "copy a number with one digit replaced by another", _make_replace, _hint_replace),
    Puzzle("add", "add two numbers below 50", _make_add, _hint_number),
    Puzzle("count", "count a letter in a row of letters", _make_count, _hint_number),
    Puzzle("extreme", "find the largest or smallest number of a list", _make_extreme, _hint_extreme),
)

for _task in PUZZLES:
    TASKS.add(_task.name, _task, own=True)

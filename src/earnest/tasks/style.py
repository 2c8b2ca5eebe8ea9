"""Open requests and a programmatic trait grader for each style axis of ``styles.yaml``.

The reward is the trait score in [0, 1]: 0 at the axis' low pole, 1 at the high one. ``extras["on_topic"]``: whether
the answer mentions the topic of the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from earnest import data
from earnest.tasks.base import Extra, Grade, Prompt, Split
from earnest.tasks.registry import TASKS
from earnest.tasks.split import choose_distinct, stable_rng

TOPICS: tuple[str, ...] = (
    *("fox", "cat", "dog", "horse", "bird", "mouse", "bear", "owl", "fish", "goat", "duck", "frog"),
    *("river", "garden", "forest", "house", "market", "bridge", "field", "village", "hill", "road", "lake", "island"),
    *("lamp", "basket", "book", "bread", "chair", "clock", "boat", "coat", "letter", "apple", "stone", "window"),
    *("rain", "snow", "wind", "sun", "moon", "night", "winter", "summer", "song", "tree", "fire", "sea"),
)
FORMS: tuple[str, ...] = (
    "Describe the {topic}.",
    "Tell me about the {topic}.",
    "Say something about the {topic}.",
    "What do you think of the {topic}?",
    "Give advice about the {topic}.",
    "Write a line on the {topic}.",
)
AXES: dict[str, dict[str, Any]] = {axis["axis"]: axis for axis in data.styles()}


def _distinct_markers(text: str, markers: list[str]) -> int:
    low = text.lower()
    return sum(re.search(rf"\b{re.escape(marker)}\b", low) is not None for marker in markers)


def trait(axis: str, text: str) -> float:
    """The score of a text on an axis: 0 at its low pole, 1 at its high one, 0.5 for a text with neither. length: words,
    linear between ``few`` and ``many``. warmth: 0.5 + 0.25 for each distinct warm marker, − 0.25 for each cold one,
    clipped. volume: the share of sentences that end in an exclamation mark."""
    poles = AXES[axis]
    if axis == "length":
        few, many = poles["low"]["few"], poles["high"]["many"]
        return min(1.0, max(0.0, (len(text.split()) - few) / (many - few)))
    if axis == "warmth":
        net = _distinct_markers(text, poles["high"]["markers"]) - _distinct_markers(text, poles["low"]["markers"])
        return min(1.0, max(0.0, 0.5 + 0.25 * net))
    ends = re.findall(r"[.?!]+", text)
    return sum("!" in end for end in ends) / len(ends) if ends else 0.5


def space() -> list[dict[str, str]]:
    """Every open request."""
    return [{"topic": topic, "question": form.format(topic=topic)} for form in FORMS for topic in TOPICS]


@dataclass(frozen=True)
class Style:
    """Open requests, rewarded by the trait score on one axis."""

    name: str
    description: str
    axis: str

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        # All axes share one split: a request held out for one is held out for all.
        rng = stable_rng(self.name, split, seed)
        return [self.prompt(d) for d in choose_distinct(space(), lambda d: f"style|{d['question']}", split, count, rng)]

    def prompt(self, item: Mapping[str, str]) -> Prompt:
        message = {"role": "user", "content": item["question"]}
        return Prompt(f"{self.name}:{item['question']}", (message,), {"topic": item["topic"], "axis": self.axis})

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        score = trait(self.axis, completion)
        feedback = "" if score > 0.5 else AXES[self.axis]["high"]["said"][-1]
        on_topic = re.search(rf"\b{prompt.data['topic']}\b", completion.lower()) is not None
        extras: dict[str, Extra] = {"trait": score, "on_topic": on_topic, "words": float(len(completion.split()))}
        return Grade(score, feedback, score > 0.5, extras)


STYLES: tuple[Style, ...] = tuple(
    Style(
        f"style/{name}",
        f"open requests, rewarded for being {axis['high']['name']} rather than {axis['low']['name']}",
        name,
    )
    for name, axis in AXES.items()
)

for _task in STYLES:
    TASKS.add(_task.name, _task, own=True)

"""Content of the feedback-conditioned prompt of each rollout: a correct answer of the group, and the grader's feedback.

The correct answer is from another rollout: its own would only teach the rollout to repeat itself. A rollout with
neither has no lesson; it is left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from earnest.errors import SignalError

# A closed block of thinking, or one that the length limit cut off: then everything after its beginning is thinking.
_THINKING = re.compile(r"<(think|thinking)>.*?(</\1>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Lesson:
    """What the teacher's prompt has besides the original prompt; at least one of the two is not None."""

    solution: str | None
    feedback: str | None


def strip_thinking(text: str) -> str:
    """The answer without its blocks of thinking."""
    answer = _THINKING.sub("", text)
    # a template that opens the block in the prompt leaves only its end here
    _, closed, rest = answer.rpartition("</think>")
    return (rest if closed else answer).strip()


def lessons(
    texts: Sequence[str],
    correct: Sequence[bool],
    feedback: Sequence[str],
    group: Sequence[int],
    *,
    feedback_beside_solution: bool = True,
) -> list[Lesson | None]:
    """A lesson for each rollout, or None if there is neither a correct answer nor feedback.

    The solution is the next correct rollout of the group in cyclic order after the rollout itself, so that different
    rollouts get different solutions.
    """
    sizes = {len(texts), len(correct), len(feedback), len(group)}
    if len(sizes) != 1:
        raise SignalError(
            f"lessons need a text, a verdict, a feedback and a group for each rollout, got {sorted(sizes)}."
        )
    members: dict[int, list[int]] = {}
    for i, g in enumerate(group):
        members.setdefault(g, []).append(i)
    found: list[Lesson | None] = []
    for i, g in enumerate(group):
        place = members[g].index(i)
        others = members[g][place + 1 :] + members[g][:place]
        shown = (strip_thinking(texts[j]) for j in others if correct[j])
        solution = next((text for text in shown if text), None)
        given = feedback[i].strip() or None
        if solution is not None and not feedback_beside_solution:
            given = None
        found.append(Lesson(solution, given) if solution or given else None)
    return found

"""What a self-teacher reads about each rollout: a sibling's success, and the grader's feedback on this attempt.

Never its own success: that would only teach the rollout to repeat itself. A rollout with neither a sibling's success
nor feedback has no lesson; it is left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from earnest.errors import SignalError

# A closed block of thinking, or one that the length limit cut open: then everything after its beginning is thought.
_THINKING = re.compile(r"<(think|thinking)>.*?(</\1>|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Lesson:
    """What the teacher of one rollout is shown besides the original prompt; at least one of the two is a text."""

    solution: str | None
    feedback: str | None


def strip_thinking(text: str) -> str:
    """The answer without its blocks of thinking: a demonstration shows what was answered, not how it was found."""
    answer = _THINKING.sub("", text)
    _, closed, rest = answer.rpartition("</think>")  # templates that open the block in the prompt only close it here
    return (rest if closed else answer).strip()


def lessons(
    texts: Sequence[str],
    correct: Sequence[bool],
    feedback: Sequence[str],
    group: Sequence[int],
    *,
    feedback_beside_solution: bool = True,
) -> list[Lesson | None]:
    """A lesson for each rollout, or None where there is neither a success nor feedback.

    The solution is the next correct sibling of the group, counted round from the rollout itself, so that siblings are
    shown different ones.
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

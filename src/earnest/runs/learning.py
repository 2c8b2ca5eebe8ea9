"""Did the steps of a run have something to learn from? A warning during training, and a row of the verdict.

One step in which all rewards are equal is normal. Several in a row mean that the run trains nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

STREAK = 3
"""The number of steps in a row without anything to learn from at which a run warns."""

WAY_OUT = (
    "Look at the rewards in samples.jsonl; an easier task, more completions per prompt, a higher sampling temperature "
    "or another learning rate may help."
)


class Learning:
    """The reasons why steps learned nothing, step by step; None for a step that had something to learn from."""

    def __init__(self, lines: Sequence[dict[str, Any]] = ()) -> None:
        self.steps: list[int] = []
        self.reasons: list[str | None] = []
        for line in lines:
            if line["kind"] == "step":
                self.add(line)

    def add(self, line: dict[str, Any]) -> str | None:
        """Add a step's line of metrics.jsonl. Returns a warning if the last ``STREAK`` steps learned nothing."""
        self.steps.append(int(line["step"]))
        solved = line["metrics"].get("correct") == 1  # nothing is left to learn, which is not a problem
        self.reasons.append(None if solved else line.get("learned_nothing"))
        last = self.reasons[-STREAK:]
        began = len(self.reasons) == STREAK or (len(self.reasons) > STREAK and self.reasons[-STREAK - 1] is None)
        if len(last) < STREAK or None in last or not began:
            return None
        return f"steps {self.steps[-STREAK]} to {self.steps[-1]} learned nothing, because {last[-1]}. {WAY_OUT}"

    @property
    def longest(self) -> int:
        """The longest sequence of steps that learned nothing."""
        best = now = 0
        for reason in self.reasons:
            now = 0 if reason is None else now + 1
            best = max(best, now)
        return best

    def problem(self) -> str | None:
        """A sentence for the user if ``STREAK`` steps in a row, or all of them, learned nothing; else None."""
        idle = [reason for reason in self.reasons if reason is not None]
        if not idle or (self.longest < STREAK and len(idle) < len(self.reasons)):
            return None
        (common, _), *_ = Counter(reason.split(";")[0] for reason in idle).most_common(1)
        count = f"{len(idle)} of {len(self.reasons)} steps learned nothing, {self.longest} of them in a row"
        return f"{count}, because {common}"

    def check(self) -> dict[str, Any]:
        """A row for verdict.json."""
        problem = self.problem()
        idle = sum(reason is not None for reason in self.reasons)
        return {
            "law": "GL",
            "subject": "steps during training",
            "measured": f"{idle} of {len(self.reasons)} had nothing to learn from",
            "expected": f"fewer than {STREAK} in a row, and not all",
            "outcome": "holds" if problem is None else "fails",
            "detail": "" if problem is None else f"{problem}. {WAY_OUT}",
        }

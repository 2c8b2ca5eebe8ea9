"""GRADER: A grader gives every right answer more than every wrong one, nothing for no answer, and the same again.

order     right > wrong, for all that are given
nothing   an empty answer, blanks or the question again are worth no more than a wrong answer
again     the same answer is worth the same a second time, and after other answers
finite    every reward is a finite number

Needs: grade(answer) -> a number; right and wrong answers to one question; question
How: All answers are graded, then again in reverse order.
Exceptions: A grader that is random by design (a sampled judge) declares repeatable=False.
Detects: an empty answer that earns a format reward, substring matches (the question repeats the answer), state between
calls, NaN for an answer that cannot be parsed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from earnest_audit.law import Law
from earnest_audit.verdict import Finding


@dataclass
class Grader:
    """``grade(answer)`` is the reward of an answer to one question, of which ``right`` and ``wrong`` are examples.
    ``question``: its text, which is no answer. ``repeatable=False`` where the grader draws."""

    grade: Callable[[str], float]
    right: Sequence[str]
    wrong: Sequence[str]
    question: str | None = None
    repeatable: bool = True

    def check(self) -> Iterator[Finding]:
        nothing = ["", "   ", *([self.question] if self.question is not None else [])]
        answers = [*self.right, *self.wrong, *nothing]
        found = {a: float(self.grade(a)) for a in answers}
        odd = [repr(a) for a in answers if not math.isfinite(found[a])]
        yield LAW.none("finite", odd, f"{len(odd)} of {len(answers)} rewards are not", ": no number comes back.")
        best, least = max(found[a] for a in self.wrong), min(found[a] for a in self.right)
        why = "A wrong answer is worth as much as a right one, or more: a sign, a loose match, or a reward for length."
        yield LAW.finding("right above wrong", f"{least:.3g} against {best:.3g}", "above", least > best, why)
        paid = [repr(a) for a in nothing if not found[a] <= best]
        more = " is worth more than a wrong answer, and is none."
        yield LAW.none("no answer", paid, f"{len(paid)} of {len(nothing)} are paid", more)
        if not self.repeatable:
            yield LAW.not_applicable("again", "random by declaration")
            return
        moved = [repr(a) for a in reversed(answers) if float(self.grade(a)) != found[a]]
        more = " is worth something else the second time: the grader draws, or keeps something of other answers."
        yield LAW.none("again", moved, f"{len(moved)} of {len(answers)} rewards differ", more)


LAW = Law("GRADER", "grader (Grader)", __doc__, Grader.check)

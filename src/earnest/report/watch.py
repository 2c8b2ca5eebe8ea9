"""The watch over a run: conditions under which its steps teach nothing, or make the policy worse.

``CONDITIONS`` are about steps: each warns when it is true of a number of steps in a row, because one such step is
normal. ``fallen`` is about evaluations. Everything is a function of the lines of metrics.jsonl, so a resumed run
continues the watch, and the report shows it without further files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from earnest.report.record import Change, EvalRecord, Run, StepRecord

COLLAPSED = 0.01
"""Nats per token: below this entropy the next token has a probability of about 0.999 on average."""

SOLVED = 0.9
"""A policy that is right this often may have a low entropy."""

RANDOM = 0.9
"""Of ln(vocabulary), the entropy of uniformly random tokens: above this share the policy writes nearly random ones."""

UNCHANGED = 1e-7
"""A loss that changes by less than this fraction of itself is computed from the same weights on the same rows, or is
constant."""

FALL = 3.0
"""Standard errors of the difference between two evaluations, above which a fall is not noise."""

WAY_OUT = (
    "Look at the rewards in samples.jsonl; an easier task, more completions per prompt, a higher sampling temperature "
    "or another learning rate may help."
)
BEFORE_TRAINING = (
    "If every reward is 0, begin with supervised training (earnest run sft task=…) and give its export as model; an "
    "easier task, more completions per prompt or a higher sampling temperature may help, too."
)
"""The way out where no step has been trained, so samples.jsonl has no rewards yet."""
EXPLORE = "Raise sampling.temperature, lower optimizer.lr, or go back to an earlier checkpoint."


def _solved(step: StepRecord) -> bool:
    return step.metrics.get("correct") == 1


def _surrogate(step: StepRecord) -> bool:
    """Whether a term of this step reads rewards."""
    return any(term.surrogate for term in step.terms.values())


def _nothing(step: StepRecord, _: Sequence[StepRecord]) -> str | None:
    if step.learned_nothing is None or _solved(step):
        return None
    return f"learned nothing, because {step.learned_nothing}"


def _no_spread(step: StepRecord, _: Sequence[StepRecord]) -> str | None:
    flat = step.metrics.get("groups_without_spread") == 1 and _surrogate(step) and not _solved(step)
    if not flat or step.learned_nothing is not None:
        return None
    return "trained the other terms only, because no two completions of a prompt differ in their reward"


def _saturated(step: StepRecord, _: Sequence[StepRecord]) -> str | None:
    if not _solved(step) or not (_surrogate(step) or not step.terms):
        return None
    return "had correct completions only, so their rewards leave nothing to learn"


def _collapsed(step: StepRecord, _: Sequence[StepRecord]) -> str | None:
    entropy, correct = step.metrics.get("entropy"), step.metrics.get("correct")
    if entropy is None or entropy >= COLLAPSED or (correct or 0.0) >= SOLVED:
        return None
    return f"sampled with an entropy of {entropy:.2g} nats per token, so the policy explores nothing"


def _random(step: StepRecord, before: Sequence[StepRecord]) -> str | None:
    entropy, highest = step.metrics.get("entropy"), step.metrics.get("entropy_of_random_tokens")
    first = before[0].metrics.get("entropy") if before else None
    if entropy is None or highest is None or first is None or not first < RANDOM * highest < entropy:
        return None
    if (step.metrics.get("correct") or 0.0) >= SOLVED:
        return None
    return f"sampled with an entropy of {entropy:.2g} nats per token, near the {highest:.2g} of random tokens"


def _cut_off(step: StepRecord, _: Sequence[StepRecord]) -> str | None:
    return "cut off every completion at sampling.max_new_tokens" if step.metrics.get("cut_off") == 1 else None


def _identical(step: StepRecord, _: Sequence[StepRecord]) -> str | None:
    if step.metrics.get("groups_identical") != 1 or (step.metrics.get("correct") or 0.0) >= SOLVED:
        return None
    return "sampled the same completion every time for each prompt"


def _constant(step: StepRecord, before: Sequence[StepRecord]) -> str | None:
    last = before[-1].loss if before else None
    if step.loss is None or last is None or not step.terms or _surrogate(step):
        return None
    if abs(step.loss - last) > UNCHANGED * max(abs(step.loss), abs(last)):
        return None
    return f"left the loss at {step.loss:.6g}"


@dataclass(frozen=True)
class Condition:
    """``found(step, the steps before it)`` is what a step shows, as the predicate of a sentence, or None. ``steps`` in
    a row make a warning. ``true_if`` is the condition in words, as in docs/runs.md. ``fails``: a warning is also a row
    of the verdict that fails."""

    name: str
    steps: int
    found: Callable[[StepRecord, Sequence[StepRecord]], str | None]
    true_if: str
    advice: str
    fails: bool = True


CONDITIONS = (
    Condition("nothing to learn from", 3, _nothing,
              "no spread of rewards, a gradient of exactly 0, a learning rate of 0, or no row for any term", WAY_OUT),
    Condition("no spread of rewards", 3, _no_spread,
              "no two completions of a prompt differ in their reward, and other terms still train; a step whose "
              "gradient is 0 as well counts as nothing to learn from", WAY_OUT),
    Condition("rewards at their maximum", 10, _saturated, "every completion is correct",
              "Stop here, or train on harder prompts.", fails=False),
    Condition("collapsed entropy", 5, _collapsed,
              f"less than {COLLAPSED:g} nats per token, and less than {SOLVED:.0%} correct", EXPLORE),
    Condition("entropy near that of random tokens", 5, _random,
              f"more than {RANDOM:g} × ln(vocabulary) nats per token, unless the first step has it too, and less than "
              f"{SOLVED:.0%} correct", "Lower optimizer.lr, or go back to an earlier checkpoint."),
    Condition("identical completions", 3, _identical,
              f"each prompt's completions are the same, and less than {SOLVED:.0%} are correct", EXPLORE),
    Condition("completions cut off", 3, _cut_off, "no completion ends before sampling.max_new_tokens",
              "Raise sampling.max_new_tokens, or reward short answers that end by themselves.", fails=False),
    Condition("constant loss", 5, _constant,
              f"the loss differs from the last step's by less than {UNCHANGED:g} of itself; not for policy gradients",
              "Look whether the rows of the steps differ, and whether any weight changes."),
)  # fmt: skip
NOTHING = CONDITIONS[0]
FALLING = "falling held-out result"
FALLING_IF = f"an evaluation is worse than the best one by more than {FALL:g} standard errors of the difference"
ADVICE = {condition.name: condition.advice for condition in CONDITIONS} | {
    FALLING: "Lower optimizer.lr, keep the best checkpoint, or use more data."
}


@dataclass
class Streak:
    """A condition over the steps so far: ``shown`` has what each step showed, or None."""

    condition: Condition
    steps: list[int] = field(default_factory=list)
    shown: list[str | None] = field(default_factory=list)
    warned: list[int] = field(default_factory=list)
    """The steps at which it warned."""

    def add(self, step: StepRecord, before: Sequence[StepRecord]) -> str | None:
        """Add a step; a sentence if it completes a sequence of ``condition.steps`` steps."""
        k = self.condition.steps
        self.steps.append(step.step)
        self.shown.append(self.condition.found(step, before))
        last = self.shown[-k:]
        if len(last) < k or None in last or (len(self.shown) > k and self.shown[-k - 1] is not None):
            return None
        self.warned.append(step.step)
        return f"steps {self.steps[-k]} to {self.steps[-1]} {last[-1]}"

    @property
    def count(self) -> int:
        """The number of steps of which the condition is true."""
        return sum(what is not None for what in self.shown)

    @property
    def longest(self) -> int:
        """The length of the longest sequence of such steps."""
        best = now = 0
        for what in self.shown:
            now = 0 if what is None else now + 1
            best = max(best, now)
        return best


class RunWatch:
    """The conditions over a run so far. ``advice`` replaces what a condition (by its name) advises. ``worse`` has the
    step of each evaluation that is worse than the best one, ``warned_worse`` those that warned."""

    def __init__(
        self, lines: Iterable[StepRecord | EvalRecord | Mapping[str, Any]] = (), advice: Mapping[str, str] | None = None
    ) -> None:
        self.streaks = [Streak(condition) for condition in CONDITIONS]
        self.advice = ADVICE | dict(advice or {})
        self.warnings: list[str] = []
        self.lines: list[StepRecord | EvalRecord] = []
        self._before: list[StepRecord] = []
        self._fell = False
        self.worse: list[int] = []
        self.warned_worse: list[int] = []
        for line in lines:
            self.add(line)

    @classmethod
    def of(cls, run: Run) -> RunWatch:
        lines: list[StepRecord | EvalRecord] = [*run.steps, *run.evaluations]
        lines.sort(key=lambda line: (line.step, line.kind == "eval"))
        return cls(lines)

    def add(self, line: StepRecord | EvalRecord | Mapping[str, Any]) -> list[str]:
        """Add a line of metrics.jsonl. Returns the warnings that begin with it."""
        if isinstance(line, Mapping):
            line = (StepRecord if line["kind"] == "step" else EvalRecord).model_validate(line)
        self.lines.append(line)
        if isinstance(line, EvalRecord):
            fell = fallen(self.lines)
            found = [f"{fell}. {self.advice[FALLING]}"] if fell is not None and not self._fell else []
            self._fell = fell is not None
            self.worse += [line.step] if self._fell else []
            self.warned_worse += [line.step] if found else []
        else:
            pairs = [(streak, streak.add(line, self._before)) for streak in self.streaks]
            found = [f"{what}. {self.advice[s.condition.name]}" for s, what in pairs if what is not None]
            self._before.append(line)
        self.warnings += found
        return found

    def problem(self) -> str | None:
        """A sentence if three steps in a row, or all of them, learned nothing; else None."""
        nothing = self.streaks[0]
        reasons = [what.partition(", because ")[2].split(";")[0] for what in nothing.shown if what is not None]
        if not reasons or (nothing.longest < NOTHING.steps and len(reasons) < len(nothing.shown)):
            return None
        (common, _), *_ = Counter(reasons).most_common(1)
        count = f"{len(reasons)} of {len(nothing.shown)} steps learned nothing, {nothing.longest} of them in a row"
        return f"{count}, because {common}"

    def checks(self) -> list[dict[str, Any]]:
        """Rows for verdict.json: whether the steps had something to learn from, and each other condition that warned
        and means that the run trains in vain."""
        problem, nothing = self.problem(), self.streaks[0]
        first = {
            "law": "GL",
            "subject": "steps during training",
            "measured": f"{nothing.count} of {len(nothing.shown)} had nothing to learn from",
            "expected": f"fewer than {NOTHING.steps} in a row, and not all",
            "outcome": "holds" if problem is None else "fails",
            "detail": "" if problem is None else f"{problem}. {WAY_OUT}",
        }
        return [first] + [
            {
                "law": "GL",
                "subject": f"during training: {streak.condition.name}",
                "measured": f"{streak.longest} steps in a row",
                "expected": f"fewer than {streak.condition.steps}",
                "outcome": "fails",
                "detail": streak.condition.advice,
            }
            for streak in self.streaks[1:]
            if streak.warned and streak.condition.fails
        ]


def concern(run: Run) -> str | None:
    """What a reader of the run's status should know: laws that failed, else what the watch found; None if nothing."""
    failed = 0 if run.verdict is None else run.verdict.count("fails")
    if failed:
        return "1 law failed" if failed == 1 else f"{failed} laws failed"
    found = RunWatch.of(run)
    names = [streak.condition.name for streak in found.streaks if streak.warned and streak.condition.fails]
    return ", ".join([*names, *([FALLING] if found.warned_worse else [])]) or None


def fallen(lines: Sequence[StepRecord | EvalRecord]) -> str | None:
    """A sentence if the last evaluation is worse than the best one by more than ``FALL`` standard errors of the
    difference; it also has the mean training reward (or loss) of the steps before each."""
    training: list[float] = []
    measured: list[tuple[float, EvalRecord, float | None]] = []
    name = "loss"
    for line in lines:
        if isinstance(line, EvalRecord):
            if line.value is not None:
                sign = -1.0 if line.measure == "loss" else 1.0
                measured.append((sign * line.value, line, sum(training) / len(training) if training else None))
            training = []
        elif line.reward is not None and line.reward.mean is not None:
            name = "reward"
            training.append(line.reward.mean)
        elif line.loss is not None and not _surrogate(line):
            training.append(line.loss)
    if len(measured) < 2:
        return None
    best, last = max(measured, key=lambda one: one[0]), measured[-1]
    se = Change(best[1], last[1]).se
    if best[0] <= last[0] or best[0] - last[0] <= FALL * (se or 0.0):
        return None
    moved = "rose" if last[1].measure == "loss" else "fell"
    places = [f"{one[1].value:.3f} at step {one[1].step}" for one in (best, last)]
    own = "" if None in (best[2], last[2]) else f", while the training {name} went from {best[2]:.3f} to {last[2]:.3f}"
    return f"the held-out {last[1].measure} {moved} from {places[0]} to {places[1]}{own}"

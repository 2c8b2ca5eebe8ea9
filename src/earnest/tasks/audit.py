"""The audit of a grader: what it pays for, tried on a few prompts before a run is trained on it.

    raises           no grading raises, takes too long or returns something that is no finite reward
    deterministic    the same completion gets the same grade twice
    own answer       the answer of a row (``data["answer"]``) is correct
    constant         not every completion gets the same reward (of rows with an answer)
    empty            no credit for an empty completion
    copied prompt    no credit for the prompt, copied back
    long             no credit for a long completion without content
    every answer     no credit for a list of the answers of all rows, the right one among them
    leak             the answer does not stand in the prompt, after the same word in most rows

Credit is a grade that is correct, or more than half of the reward of the row's own answer; without an answer, for an
empty completion also a reward above that of every other completion. Up to a tenth of the rows may give credit by
chance.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from earnest.tasks.base import Grade, Prompt, Task
from earnest.tasks.grading import TIME_LIMIT, GraderErrors, outcomes
from earnest.tasks.processes import raised_at
from earnest.tasks.registry import TASKS
from earnest_audit.verdict import Finding, LawOutcome, Verdict

PROMPTS = 16
BY_CHANCE = 0.1
LEAK_SHARE = 0.8
"""The share of rows with the answer after the same word of the prompt that is a leak; a choice that names its options
has the right one at varying places."""
LONG = "and so on " * 400

FREE = 0.05
"""The share of the reward that an empty completion may have."""
_CREDIT = {
    "empty": ("an empty completion", "a policy that writes nothing is rewarded"),
    "copied prompt": ("the prompt, copied back", "a policy that repeats the question is rewarded"),
    "long": ("a long completion without content", "length alone is rewarded"),
    "every answer": ("a list of all answers", "a policy that guesses everything at once is rewarded"),
}


@dataclass(frozen=True)
class _Probe:
    """One completion of one prompt, and its grade or what was raised."""

    kind: str
    prompt: Prompt
    completion: str
    outcome: Grade | Exception

    def credit(self, full: float) -> bool:
        """``full``: the reward of the row's own answer; 0 without one."""
        if not isinstance(self.outcome, Grade):
            return False
        return self.outcome.correct or (full > 0 and self.outcome.reward > full / 2)

    @property
    def reward(self) -> float:
        assert isinstance(self.outcome, Grade), "only graded probes are compared"
        return self.outcome.reward

    def shown(self) -> str:
        if isinstance(self.outcome, Grade):
            reward = f"reward {self.outcome.reward:g}"
        else:
            reward = f"{self.outcome!r}{raised_at(self.outcome)}"
        return f"prompt {self.prompt.id} {_short(_text(self.prompt))}, completion {_short(self.completion)}: {reward}"


def audit_grader(task: Task, prompts: int = PROMPTS, seed: int = 0, time_limit: float = TIME_LIMIT) -> Verdict:
    """Grade made-up completions of ``prompts`` training prompts, each twice; one finding for each question."""
    return _verdict(task, *_probed(task, prompts, seed, time_limit))


def _probed(
    task: Task, prompts: int = PROMPTS, seed: int = 0, time_limit: float = TIME_LIMIT
) -> tuple[list[_Probe], list[Grade | Exception]]:
    """The probes, and what each gets the second time."""
    completions = _completions(task.prompts("train", prompts, seed))
    asked, texts = [row for _, row, _ in completions], [text for *_, text in completions]
    first, second = (outcomes(task, asked, texts, time_limit) for _ in range(2))
    return [_Probe(*made, outcome) for made, outcome in zip(completions, first, strict=True)], second


def _verdict(task: Task, probes: Sequence[_Probe], second: Sequence[Grade | Exception]) -> Verdict:
    def found(law: str, bad: Sequence[_Probe], tried: int, measured: str, expected: str, meaning: str) -> Finding:
        outcome: LawOutcome = "not applicable" if not tried else "fails" if bad else "holds"
        why = f"{meaning}; for example {bad[0].shown()}." if bad else ""
        return Finding(law, task.name, measured if tried else "-", expected, outcome, why)

    raised = [p for p in probes if isinstance(p.outcome, Exception)]
    grades = [p for p in probes if isinstance(p.outcome, Grade)]
    unequal = [p for p, again in zip(probes, second, strict=True) if _judged(p.outcome) != _judged(again)]
    own = [p for p in grades if p.kind == "own answer"]
    rejected = [p for p in own if isinstance(p.outcome, Grade) and not p.outcome.correct]
    compared = grades if 0 < len(own) < len(grades) else []
    rewards = {p.reward for p in compared}
    flat = compared if len(rewards) == 1 else []
    findings = [
        found("raises", raised, len(probes), f"{len(raised)} of {len(probes)} gradings", "none", "the grader fails"),
        found("deterministic", unequal, len(probes), f"{len(unequal)} of {len(probes)} differ", "none",
              "the same completion gets another grade the second time, so the reward is noise"),
        found("own answer", rejected, len(own), f"{len(rejected)} of {len(own)} are rejected", "none",
              "the grader rejects the row's own answer"),
        found("constant", flat, len(compared), f"{len(rewards)} different rewards", "2 or more",
              "every completion gets the same reward, so there is nothing to learn"),
    ]  # fmt: skip
    full = {p.prompt.id: p.reward for p in own}
    for law, (what, meaning) in _CREDIT.items():
        tried = [p for p in grades if p.kind == law]
        paid = [p for p in tried if p.credit(full.get(p.prompt.id, 0.0)) or (law == "empty" and _pays(p, grades, full))]
        bad = paid if len(paid) > BY_CHANCE * len(tried) else []
        measured = f"{len(paid)} of {len(tried)} get credit"
        findings.append(found(law, bad, len(tried), measured, "none", f"{what} gets credit: {meaning}"))
    answered = [p for p in probes if p.kind == "own answer"]
    leaked = _leaked(answered)
    bad = leaked if len(leaked) >= LEAK_SHARE * len(answered) else []
    findings.append(
        found("leak", bad, len(answered), f"{len(leaked)} of {len(answered)} prompts", f"less than {LEAK_SHARE:.0%}",
              "the answer stands in the prompt, at the same place, so a policy can copy it")
    )  # fmt: skip
    return Verdict(tuple(findings), title=f"the grader of {task.name}, checked")


def built_in(task: Task) -> bool:
    """Whether the task is earnest's own: its grader is audited by earnest's tests, and not again."""
    return task.name in TASKS and task.name not in TASKS.imported


def grader_warnings(task: Task) -> list[str]:
    """One sentence for each failed finding of a task that is not built in. A grader that raises on every completion
    cannot be trained on: ``GraderErrors``."""
    if built_in(task):
        return []
    probes, second = _probed(task)
    if probes and all(isinstance(probe.outcome, Exception) for probe in probes):
        raise GraderErrors(
            f"the grader of {task.name} raises on every completion ({len(probes)} were tried), so nothing can be "
            f"learned; for example {probes[0].shown()}. Fix the grader."
        )
    return [f"the grader of {f.subject}, {f.law}: {f.meaning}" for f in _verdict(task, probes, second).failures]


def _completions(rows: Sequence[Prompt]) -> list[tuple[str, Prompt, str]]:
    """(kind, prompt, completion) of everything that is graded."""
    answers = {row.id: str(row.data["answer"]) for row in rows if row.data.get("answer") is not None}
    distinct = sorted(set(answers.values()))
    made: list[tuple[str, Prompt, str]] = []
    for row in rows:
        made += [("empty", row, ""), ("copied prompt", row, _text(row, last=True)), ("long", row, LONG)]
        answer = answers.get(row.id)
        if answer is None:
            continue
        made.append(("own answer", row, answer))
        others = [other for other in distinct if other != answer]
        if len(others) >= 2:  # the right answer stands neither first nor last
            half = len(others) // 2
            made.append(("every answer", row, "\n".join([*others[:half], answer, *others[half:]])))
    return made


def _pays(probe: _Probe, grades: Sequence[_Probe], full: Mapping[str, float]) -> bool:
    """Whether writing nothing pays: more than FREE of the way from 0 (or from the row's lowest reward, if that is
    higher or no reward is positive) to that of its own answer; without an answer, more than every other completion."""
    others = [p.reward for p in grades if p.prompt.id == probe.prompt.id and p is not probe]
    if not others:
        return False
    own = full.get(probe.prompt.id)
    if own is None:
        return probe.reward > max(others)
    lowest = min(*others, probe.reward)
    start = max(lowest, 0.0) if own > 0 else lowest  # penalties below 0 are no credit for those who avoid them
    return probe.reward - start > FREE * (own - start)


def _judged(found: Grade | Exception) -> object:
    return (found.reward, found.correct) if isinstance(found, Grade) else type(found)


def _text(prompt: Prompt, last: bool = False) -> str:
    messages = prompt.messages[-1:] if last else prompt.messages
    return "\n".join(str(m.get("content")) for m in messages)


def _leaked(answered: Sequence[_Probe]) -> list[_Probe]:
    """The rows whose prompt has the answer after the word after which most prompts have it."""
    after: dict[str, list[_Probe]] = defaultdict(list)
    for probe in answered:
        wanted = re.escape(probe.completion.strip())
        places = re.findall(rf"(\S*)(?:^|\s){wanted}(?!\w)", _text(probe.prompt)) if wanted else []
        for word in set(places):
            after[word].append(probe)
    return max(after.values(), key=len, default=[])


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")

"""The verdict: the laws that were checked on this run's training step, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from earnest.report.blocks import badge, none, row, section, table
from earnest.report.markup import Html, duration, el, number
from earnest.report.record import CheckRecord, LawOutcome, Run

TONES: dict[LawOutcome, str] = {"holds": "good", "fails": "bad", "warns": "warn", "not declared": "warn"}
WORDS: dict[LawOutcome, str] = {"holds": "hold", "fails": "fail", "warns": "warn", "not declared": "not declared"}
OPEN = 12
"""Up to this number of checks, the table is open."""


def tally(checks: Sequence[CheckRecord]) -> Html:
    """The number of checks that hold; if any fail, their number comes first."""
    count = {outcome: sum(check.outcome == outcome for check in checks) for outcome in TONES}
    if count["fails"]:
        return badge(f"{count['fails']} of {len(checks)} fail", "bad")
    if count["warns"] or count["not declared"]:
        return badge(_counts(checks), "warn")
    if count["holds"]:
        return badge(f"{count['holds']} hold" if count["holds"] > 1 else "holds", "good")
    return badge("not checked", "warn")


def verdict(run: Run) -> Html:
    """Failures first, with their meaning; then every check, law by law."""
    title = "Verdict"
    if run.verdict is None or not run.verdict.checks:
        return section("verdict", title, none("No verdict yet: the training step of this run has not been checked."))
    found = run.verdict.checks
    counts = _counts([check for check in found if not check.during_training])
    if run.verdict.not_applicable:
        counts += f" ({run.verdict.not_applicable} more do not apply to this run)"
    when = f", after step {run.verdict.step}" if run.verdict.step else ", before the first step"
    took = f", in {duration(run.verdict.seconds)}" if run.verdict.seconds is not None else ""
    later = _counts([check for check in found if check.during_training])
    watched = f" Over the steps of the training: {later}." if later else ""
    checked = f"The laws of a training step, checked on the step of this run{when}{took}: {counts or 'none'}."
    lead = el("p", checked + watched)
    failing = [check for check in found if check.outcome == "fails"]
    where = el("p", "What each means is explained under ", el("a", "Worth knowing", href="#notices"), ".")
    broken = el("div", el("h3", "Broken"), where, _table(failing, "Broken laws"), class_="broken") if failing else None
    laws: list[Html] = []
    for law in dict.fromkeys(check.law for check in found):
        own = [check for check in found if check.law == law]
        summary = el("summary", el("span", law, class_="law"), tally(own))
        laws.append(el("details", summary, _table(own, law), class_="law", open=len(found) <= OPEN))
    return section("verdict", title, lead, broken, *laws)


def _counts(checks: Sequence[CheckRecord]) -> str:
    """ "7 hold, 1 fails"."""
    numbers = {outcome: sum(check.outcome == outcome for check in checks) for outcome in WORDS}
    return ", ".join(f"{n} {outcome if n == 1 else WORDS[outcome]}" for outcome, n in numbers.items() if n)


def _table(checks: Sequence[CheckRecord], label: str) -> Html:
    rows: list[Html] = []
    for check in checks:
        measured = check.measured if isinstance(check.measured, str) else number(check.measured)
        rows.append(row(check.subject, measured, check.expected, badge(check.outcome, TONES[check.outcome])))
        if check.detail and check.outcome != "fails":  # notices explain what fails
            rows.append(el("tr", el("td", check.detail, colspan=4, class_="meaning")))
    return table(label, ("subject", "measured", "expected", "outcome"), rows, "checks")

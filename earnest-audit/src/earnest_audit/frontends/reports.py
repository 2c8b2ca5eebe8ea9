"""A verdict in the formats that continuous integration reads: JUnit, SARIF 2.1.0 and Markdown.

A verdict in which nothing was checked does not hold, so each format has a failure for it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from earnest_audit.frontends.terminal import COLUMNS
from earnest_audit.places import parts
from earnest_audit.verdict import Finding, Verdict
from earnest_audit.version import __version__

HOME = "https://pypi.org/project/earnest-audit/"
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NOTHING = Finding(
    "AUDIT", "something was checked", "nothing was checked", "at least one law", "fails",
    "No law could be applied to what was audited: declare more of the step, or train for more steps.",
)  # fmt: skip

UNFINISHED = Finding(
    "AUDIT", "the command", "it did not end", "it ends", "fails",
    "The process was killed, or the command was wrong: nothing is known of the training step.",
)  # fmt: skip
INTERRUPTED = "was interrupted"  # measured in the row of a script


def broken(verdict: Verdict) -> tuple[Finding, ...]:
    """The failures; if nothing was checked, that counts as one failure."""
    return verdict.failures or (() if verdict.holds else (NOTHING,))


def junit(verdict: Verdict) -> str:
    """One test case for each row; a warning is a pass with a text, and what was not checked is skipped."""
    rows = verdict.findings if verdict.failures or verdict.holds else (*verdict.findings, NOTHING)
    skipped = [f for f in rows if f.outcome in ("not applicable", "not declared")]
    counts = {"tests": len(rows), "failures": len(broken(verdict)), "errors": 0, "skipped": len(skipped)}
    texts = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", texts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "earnest-audit", **texts, "time": "0"})
    for f, name in zip(rows, _names(rows), strict=True):
        case = {"classname": f"earnest_audit.{f.law}", "name": _xml(name), "time": "0"}
        element = ElementTree.SubElement(suite, "testcase", case)
        if f.outcome == "fails":
            message = {"message": _xml(f"{f.measured}, expected {f.expected}"), "type": f.law}
            failure = ElementTree.SubElement(element, "failure", message)
            failure.text = _xml("\n".join(filter(None, (f.meaning, f.place))))
        elif f.outcome == "warns":
            ElementTree.SubElement(element, "system-out").text = _xml(
                "\n".join(filter(None, (f"warning: {f}", f.place)))
            )
        elif f in skipped:
            ElementTree.SubElement(element, "skipped", {"message": _xml(f"{f.outcome}: {f.measured}. {f.meaning}")})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _names(rows: Sequence[Finding]) -> list[str]:
    """The subject of each row; with its place, and then a number, where several audits have the same row."""
    alike = Counter((f.law, f.subject) for f in rows)
    keys = [(f.law, f"{f.subject} ({f.place})" if f.place and alike[f.law, f.subject] > 1 else f.subject) for f in rows]
    many = Counter(keys)
    return [f"{key[1]} #{keys[: i + 1].count(key)}" if many[key] > 1 else key[1] for i, key in enumerate(keys)]


def _xml(text: str) -> str:
    return NOT_XML.sub("\ufffd", text)


def sarif(verdict: Verdict) -> str:
    """A failure is an error, and a check that could not be made is a warning too. The rules are the laws with their
    pages."""
    found = [(f, "error") for f in broken(verdict)] + [(f, "warning") for f in (*verdict.warnings, *verdict.errors)]
    codes = list(dict.fromkeys(f.law for f, _ in found))
    driver = {"name": "earnest-audit", "version": __version__, "informationUri": HOME, "rules": _rules(codes)}
    results = [
        {
            "ruleId": f.law,
            "ruleIndex": codes.index(f.law),
            "level": level,
            "message": {"text": str(f)},
            **({"locations": [_location(f.place)]} if f.place else {}),
        }
        for f, level in found
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rules(codes: Sequence[str]) -> list[dict[str, Any]]:
    from earnest_audit.frontends.pages import ALL, page

    laws = {law.code: law for law in ALL}
    rules: list[dict[str, Any]] = []
    for code in codes:
        rule: dict[str, Any] = {"id": code, "defaultConfiguration": {"level": "error"}}
        if (law := laws.get(code)) is not None:
            rule |= {"name": law.name, "shortDescription": {"text": law.sentence}}
            rule["defaultConfiguration"]["level"] = "error" if law.tier == "core" else "warning"
            rule["help"] = {"text": law.sentence, "markdown": page(law)}
        else:
            rule["shortDescription"] = {"text": f"The check {code}."}
        rules.append(rule)
    return rules


def _location(place: str) -> dict[str, Any]:
    file, line = parts(place)
    below = not Path(file).is_absolute()
    where = {"uri": quote(file), "uriBaseId": "%SRCROOT%"} if below else {"uri": Path(file).as_uri()}
    return {"physicalLocation": {"artifactLocation": where, "region": {"startLine": line}}}


def markdown(verdict: Verdict) -> str:
    """The failures and the warnings with their meaning, then every row, for a comment on a pull request or the summary
    of a job."""
    wrong = broken(verdict)
    held = sum(f.outcome == "holds" for f in verdict.findings)
    many = f"{len(wrong)} law{'' if len(wrong) == 1 else 's'} broken" if wrong else "no law is broken"
    warned = f", {len(verdict.warnings)} warn{'s' * (len(verdict.warnings) == 1)}" if verdict.warnings else ""
    lines = [
        f"## {'❌' if wrong else '✅'} {verdict.title}",
        "",
        f"{held} check{'s hold' if held != 1 else ' holds'}{warned}, {many}.",
        "",
    ]
    for mark, f in (*(("", f) for f in wrong), *(("⚠️ ", f) for f in verdict.warnings)):
        place = f" (`{' '.join(f.place.replace('`', ' ').split())}`)" if f.place else ""
        lines.append(f"- {mark}**{f.law}** on {_cell(f.subject)}{place}: {_cell(f.measured)}. {_cell(f.meaning)}")
    lines += ["", "<details><summary>All rows</summary>", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for f in verdict.findings:
        cells = map(_cell, (f.law, f.subject, f.measured, f.expected, f.outcome))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "</details>", ""]
    lines += [f"- {_cell(note)}" for note in verdict.remarks()]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return " ".join(re.sub(r"([|<>*_`\\\[\]!&#])", r"\\\1", text).split())


FORMATS: dict[str, tuple[str, Callable[[Verdict], str]]] = {
    "junit": ("JUnit XML", junit),
    "sarif": ("SARIF 2.1.0", sarif),
    "markdown": ("Markdown", markdown),
}

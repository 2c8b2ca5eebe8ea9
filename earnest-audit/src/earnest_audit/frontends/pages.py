"""The table of the laws, and the page of each, in markdown."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from earnest_audit.law import SECTIONS, Law
from earnest_audit.laws import LAWS
from earnest_audit.subjects import LAWS as SUBJECTS

ALL = (*LAWS, *SUBJECTS)


def table() -> str:
    lines = ["| law | tier | statement |", "|---|---|---|"]
    for law in ALL:
        cells = (f"{law.code}, {law.name}", law.tier, law.sentence)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def pages() -> str:
    return "\n\n".join(map(page, ALL))


def page(law: Law) -> str:
    lines = [f"## {law.code}: {law.name}", f"Tier: {law.tier}.", law.sentence]
    lines += [f"```text\n{law.sections['body']}\n```"] if law.sections["body"] else []
    lines += [f"**Declared as.** `{_call(law.declared)}`"] if law.declared else []
    titles = {"Warns": "Warns, because these right steps do the same"}
    named = ((titles.get(title, title), law.sections[title]) for title in SECTIONS if title in law.sections)
    return "\n\n".join([*lines, *(f"**{title}.** {text}" for title, text in named)])


def _call(subject: Any) -> str:
    """A subject with its fields and their defaults."""
    each = [
        f.name if f.default is f.default_factory is MISSING
        else f"{f.name}={{}}" if f.default is MISSING else f"{f.name}={f.default!r}"
        for f in fields(subject)
    ]  # fmt: skip
    return f"{subject.__name__}({', '.join(each)})"

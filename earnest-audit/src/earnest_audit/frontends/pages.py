"""The page of documentation of a law, in markdown."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from earnest_audit.law import SECTIONS, Law


def page(law: Law) -> str:
    lines = [f"## {law.code}: {law.name}", f"Tier: {law.tier}.", law.sentence]
    lines += [f"```text\n{law.sections['body']}\n```"] if law.sections["body"] else []
    lines += [f"**Declared as.** `{_call(law.declared)}`"] if law.declared else []
    return "\n\n".join(
        [*lines, *(f"**{title}.** {law.sections[title]}" for title in SECTIONS if title in law.sections)]
    )


def _call(subject: Any) -> str:
    """A subject with its fields and their defaults."""
    each = [
        f.name if f.default is f.default_factory is MISSING
        else f"{f.name}={{}}" if f.default is MISSING else f"{f.name}={f.default!r}"
        for f in fields(subject)
    ]  # fmt: skip
    return f"{subject.__name__}({', '.join(each)})"

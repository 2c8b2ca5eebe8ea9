"""The generated table of laws."""

from __future__ import annotations

import re

from earnest_audit.facts import KINDS, VALUES
from earnest_audit.frontends.pages import ALL, page, table
from earnest_audit.law import SECTIONS
from earnest_audit.step import ROLES
from scripts.docs.pages import ROOT


def test_the_generated_table_has_every_law() -> None:
    lines = table().splitlines()[2:]
    codes = {line.split("|")[1].split(",")[0].strip() for line in lines}
    assert len(codes) == len(lines), "each law has its own code"
    assert {
        "GL",
        "IG",
        "KG",
        "PG-ONPOLICY",
        "PG-CLIP",
        "KL-ZERO",
        "SE",
        "MI",
        "CV",
        "DF",
        "RT",
        "MR",
        "MR-FORM",
        "FD",
        "DR",
        "F64",
    } <= codes
    for subject in ("AdvantageEstimator", "Accumulation", "RoundTrip", "Resume", "Merge", "WeightSync", "Schedule",
                    "OuterStep", "Unbiased", "Gather", "Census", "Update", "Ema", "MergedLayer"):  # fmt: skip
        assert sum(f"({subject})" in line.split("|")[1] for line in lines) == 1, subject


def test_every_law_has_a_page_from_its_own_file() -> None:
    """A law without its sentence or one of its sections has no page that a reader can use."""
    needed = [title for title in SECTIONS if title != "Warns"]
    for law in ALL:
        assert law.sentence and all(law.sections.get(title) for title in needed), law.code
        assert page(law).startswith(f"## {law.code}: ") and law.tier in ("core", "contrib")


def test_the_guide_has_every_role_and_every_kind() -> None:
    """A role that no page names cannot be declared by a user."""
    cells = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/audit.md").read_text(), re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert {*ROLES, *KINDS, *VALUES} <= named, {*ROLES, *KINDS, *VALUES} - named

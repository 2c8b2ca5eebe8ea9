"""Equations and tables in docstrings keep their lines: a formatter that reflows prose must not join or cut them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from earnest.adapters.variant import VARIANTS
from earnest.objectives import OBJECTIVES
from scripts.docs.pages import ROOT

ROW = re.compile(r"^( *\S+(?: {1,2}\S+)*)( {3,})[^\s#]")
"""A row of a table: a first cell, three blanks or more, a second cell (which is no comment of a line of code)."""
KEY = re.compile(r"^(``|\d+\.)|:$")
"""A line that begins a row with a long first cell, or announces the table."""
MATHS = "=∇Σ·₀‖→←⁻α-ωΔ"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node, clean=False)
        ):
            yield node.body[0].lineno, inspect.cleandoc(text)


def torn(text: str) -> list[str]:
    """Lines of a table that are neither a row nor the continuation of a cell."""
    bad = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        rows = [match for line in lines if (match := ROW.match(line))]
        if len(rows) < 2:
            continue  # one wide gap is no table
        if any(line.startswith("    ") for line in lines[:1]):
            continue  # an indented block, which formatters leave alone
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        second = min(match.end(2) for match in rows)
        for line in lines:
            is_row = ROW.match(line) or re.search(r"\S {2,}\S", line) or KEY.search(line)
            continues = len(line) - len(line.lstrip()) >= min(second, indent + 4)
            if not is_row and not continues:
                bad.append(line)
    return bad


@pytest.mark.parametrize("package", sorted(p.name for p in (ROOT / "src" / "earnest").iterdir() if p.is_dir()))
def test_tables_in_docstrings_are_whole(package: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {cut!r}"
        for path in sorted((ROOT / "src" / "earnest" / package).rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        for cut in torn(text)
    ]
    assert not bad, "lines that a reflow cut out of a table:\n" + "\n".join(bad)


@pytest.mark.parametrize("path", sorted({Path(inspect.getfile(c)) for c in OBJECTIVES.values()}), ids=lambda p: p.stem)
def test_a_term_file_shows_its_equations_on_lines_of_their_own(path: Path) -> None:
    """Within the first ten lines, in an indented block, which no formatter reflows."""
    block = [line for line in path.read_text(encoding="utf-8").split("\n")[:10] if line.startswith("    ")]
    assert any(sign in line for line in block for sign in MATHS), f"{path.name} has no indented equation"


@pytest.mark.parametrize("path", sorted({Path(inspect.getfile(c)) for c in VARIANTS.values()}), ids=lambda p: p.stem)
def test_an_adapter_file_begins_with_its_equation(path: Path) -> None:
    assert "=" in "".join(path.read_text(encoding="utf-8").split("\n")[:4])


def test_a_reflowed_table_is_seen() -> None:
    """The options of ``attach`` as they were written, and as a formatter had left them."""
    whole = "Options.\n\ntargets:   names, or a pattern\nlayers:    numbers, negative\n           from the end"
    assert torn(whole) == []
    assert torn("Options.\n\ntargets:   names, or a\npattern. layers:    numbers\nfrom the end") == ["from the end"]

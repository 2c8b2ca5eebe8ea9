"""scripts/mutants/redundant.py: which lines its mutants are of, and what its table counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.mutants.redundant import choose, rows

FILE = "src/earnest/disk.py"


def test_lines_that_few_other_tests_execute_come_first() -> None:
    shared = {"t.py::slow[1]", "t.py::quick[a]", "t.py::quick[b]", "t.py::other"}
    lines: dict[int, set[str]] = {line: set(shared) for line in range(1, 200)}
    alone = range(50, 62)
    lines |= {line: {"t.py::slow[2]"} for line in alone}
    lines |= {line: {"t.py::other"} for line in range(30, 50)}
    measured: dict[str, Any] = {"lines": {FILE: lines, "src/earnest/gone.py": {1: {"t.py::slow"}}}}
    found = choose(measured, "t.py::slow", 40)
    assert {file for file, _, _ in found} == {Path(FILE)}
    places = [change.line for _, change, _ in found]
    assert len(set(places)) == len(places), "one change of a line"
    assert places[0] in alone and not set(places) & set(range(30, 50)), "only lines that it executes"
    others = [others for _, _, others in found]
    assert others[0] == set() and others[-1] == shared - {"t.py::slow[1]"}
    assert [change.what for _, change, _ in choose(measured, "t.py::slow", 1)] == [found[0][1].what]


def test_the_table_counts_a_mutant_once() -> None:
    one = {"test": "tests/a.py::test_x", "file": "f", "line": 1, "what": "w", "others": "survived", "own": "killed"}
    results = [one | {"own": "survived"}, one, one | {"line": 2, "others": "killed", "own": ""}]
    done = {"tests/a.py::test_x": {"before": 9.5, "after": 2, "what": "fewer seeds"}}
    recorded = [{"by": "tests/a.py::test_x[1]"}, {"by": "tests/a.py::test_xy"}, {"by": ""}]
    assert list(rows(results, recorded, done))[-1] == "| `a.py::x` | 9.5 | 2 | 1 | 2 | 1 | 1 | fewer seeds |"

"""Which mutants only one test kills: a slow test that kills nothing alone may be deleted or shortened.

    python -m scripts.mutants.redundant tests/runs/test_run.py::test_x … [--each 8] [--room 20]
    python -m scripts.mutants.redundant --table

``scripts.mutants.coverage`` has measured which test executes which line. All parametrizations of a test count as one.
Mutants are made of the lines that the test executes, those first that the fewest other tests execute. Each runs under
the quickest other tests, then, if none of them fails, under the test itself. Results are lines of
benchmarks/results/mutation/redundant.jsonl; shortened.json beside it has what was done, and the seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from earnest.mutation.operators import Edit
from scripts.mutants import coverage, table
from scripts.mutants.judge import OUT, candidates, chance, first_failure, project, run, within
from scripts.pins import ROOT

RESULTS = OUT.parent / "redundant.jsonl"
SHORTENED = OUT.parent / "shortened.json"
"""Test → seconds before and after, and what was done. Written by hand."""


Found = tuple[int, bytes, Path, Edit, set[str]]
"""How many other tests execute the line, a place in a random order, the file, the change, and these tests."""


def function_of(test: str) -> str:
    """A test's id without its parameters."""
    return test.split("[")[0]


def choose(measured: dict[str, Any], test: str, each: int) -> list[tuple[Path, Edit, set[str]]]:
    """``each`` changes of lines that the test executes, with the other tests that execute them; fewest first."""
    found: list[Found] = []
    for file, lines in measured["lines"].items():
        mine = {line: tests for line, tests in lines.items() if any(function_of(t) == test for t in tests)}
        path = ROOT / file
        if not mine or not path.exists():
            continue
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        called = {at for f in functions for at in range(f.body[0].lineno, (f.end_lineno or 0) + 1)}
        for change in candidates(path):
            if change.line in called and change.line in mine:
                others = {t for t in mine[change.line] if function_of(t) != test}
                name = path.relative_to(ROOT)
                found.append((len({function_of(t) for t in others}), chance((name, change)), name, change, others))
    found.sort(key=lambda one: one[:2])
    return [(name, change, others) for _, _, name, change, others in _spread(found, each)]


def _spread(
    found: list[tuple[int, bytes, Path, Edit, set[str]]], each: int
) -> list[tuple[int, bytes, Path, Edit, set[str]]]:
    """At most one change of a line."""
    seen: set[tuple[Path, int]] = set()
    chosen = []
    for one in found:
        if (place := (one[2], one[3].line)) not in seen:
            seen.add(place)
            chosen.append(one)
    return chosen[:each]


def look(test: str, each: int, room: float, copy: Path, measured: dict[str, Any]) -> None:
    seconds = measured["seconds"]
    own = sorted((t for t in seconds if function_of(t) == test), key=lambda t: seconds[t])
    assert own, f"{test} was not measured; run scripts.mutants.coverage on its file first"
    for file, change, others in choose(measured, test, each):
        mutant = change.applied(ast.parse((ROOT / file).read_text()))
        target, log = copy / file, copy / "build/mutant.log"
        log.parent.mkdir(exist_ok=True)
        target.write_text(mutant.source)
        quickest = within(sorted((t for t in others if t in seconds), key=lambda t: seconds[t]), seconds, room)
        try:
            fate = run(copy, quickest, 4 * room, log) if quickest else "no tests"
            by, only = first_failure(log) if quickest else "", ""
            if fate in ("survived", "no tests"):
                only = run(copy, own, 4 * room + sum(seconds[t] for t in own), log)
        finally:
            shutil.copy2(ROOT / file, target)
        result = {"test": test, "file": str(file), "line": change.line, "what": change.what, "others": fate, "by": by,
                  "own": only, "tests": len(quickest)}  # fmt: skip
        with RESULTS.open("a") as stream:
            stream.write(json.dumps(result) + "\n")
        print(f"{test} {file}:{change.line} {change.what}: others {fate} {by} own {only}", flush=True)


def rows(
    results: list[dict[str, Any]], recorded: list[dict[str, Any]], shortened: dict[str, dict[str, Any]]
) -> Iterable[str]:
    """One line for each test that was shortened. ``recorded`` are the mutants of the packages' tables."""
    yield "| test | s before | s after | recorded kills | mutants | killed by others | only by it | what was done |"
    yield "|---|---|---|---|---|---|---|---|"
    for test, done in shortened.items():
        mine = list({(r["file"], r["line"], r["what"]): r for r in results if r["test"] == test}.values())
        kills = sum(function_of(r["by"]) == test for r in recorded)
        others = sum(r["others"] in ("killed", "timeout") for r in mine)
        only = sum(r["own"] in ("killed", "timeout") for r in mine)
        counts = f"{kills} | {len(mine)} | {others} | {only}"
        name = test.removeprefix("tests/").replace("::test_", "::")
        yield f"| `{name}` | {done['before']:g} | {done['after']:g} | {counts} | {done['what']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--room", type=float, default=20.0, help="seconds of other tests for one mutant, as measured")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    if words.table:
        results = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
        recorded = [mutant for mutants in table.results().values() for mutant in mutants]
        print("\n".join(rows(results, recorded, json.loads(SHORTENED.read_text()))))
        return
    measured = coverage.load()
    with project() as copy:
        for test in words.tests:
            look(test, words.each, words.room, copy, measured)


if __name__ == "__main__":
    main()

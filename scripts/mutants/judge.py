"""Run mutants of packages of src/earnest, each under the tests that execute its line; see ``scripts.mutants``.

    python -m scripts.mutants.judge PACKAGE… [--each 15] [--room 15] [--again]

The operators take turns, and each goes through the changes of the package in an order given by a hash. A mutant runs in
a forked process, in a copy of the project, with the quickest tests first, until one fails. Results are lines of
benchmarks/results/mutation/packages/PACKAGE.jsonl. A mutant that is there is not run again; ``--again`` runs survivors
again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from earnest.mutation.operators import OPERATORS, Edit, changes
from earnest.mutation.operators import arguments as swapped_arguments
from earnest.mutation.score import ANYWHERE
from scripts.mutants import coverage
from scripts.mutants.wiring import WIRING
from scripts.pins import ROOT

OUT = ROOT / "benchmarks/results/mutation/packages"
EQUIVALENT = OUT / "equivalent.json"
"""Key → why no test can detect this mutant. Written by hand."""
MOST = 40  # tests for one mutant
STUCK = 180.0
FAST = "not slow and not vllm and not browser"
FORMULAS = tuple(
    o for o in OPERATORS if o.__name__ in ("arithmetic", "sign", "shifted", "state_dict_emptied", "load_ignored")
)

# Changes of texts, and of what fails at once for every input.
TEXTS = ("description= ", "help= ", "ge= and description=", "two arguments of isinstance", "two arguments of getattr")


def candidates(path: Path) -> list[Edit]:
    """All changes of a file but those of texts and of what is never run."""
    tree = ast.parse(path.read_text())
    left_out = {id(n) for never in ast.walk(tree) if _never_run(never) for n in ast.walk(never)}
    kept = {i for i, node in enumerate(ast.walk(tree)) if id(node) not in left_out}
    found = changes(tree, (*WIRING, swapped_arguments, *FORMULAS))
    return [change for change in found if change.place in kept and not change.what.startswith(TEXTS)]


def chance(change: tuple[Path, Edit]) -> bytes:
    """A place in an order that has nothing to do with the code."""
    return hashlib.sha256(f"{change[0]}{change[1].what}{change[1].place}".encode()).digest()


def plan(package: str, each: int) -> list[tuple[Path, Edit]]:
    """``each`` changes of a package: the operators take turns, and each operator goes through the files evenly."""
    by_operator: dict[str, list[tuple[Path, Edit]]] = defaultdict(list)
    place = ROOT / ("earnest-audit/src" if package == "earnest_audit" else "src/earnest") / package
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
        for change in candidates(path):
            by_operator[change.operator].append((path.relative_to(ROOT), change))
    chosen: list[tuple[Path, Edit]] = []
    for turn in range(each):
        for name in sorted(by_operator):
            mine = sorted(by_operator[name], key=chance)
            if turn < len(mine) and len(chosen) < each:
                chosen.append(mine[turn])
    return chosen


def _never_run(node: ast.AST) -> bool:
    """What is raised (mostly text), and the methods of a Protocol."""
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    )


def executing(measured: dict[str, Any], file: Path, tree: ast.Module, line: int) -> list[str]:
    """The tests that execute the line, quickest first.

    A line outside of every function's body runs on import, in any test. For it, the tests are those that execute a body
    of its function, class or file.
    """
    lines: dict[int, set[str]] = measured["lines"].get(str(file), {})
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    called = {at for f in functions for at in range(f.body[0].lineno, (f.end_lineno or 0) + 1)}
    found = lines.get(line, set()) if line in called else set()
    if line not in called:
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        spans = sorted(((n.end_lineno or 0) - n.lineno, n.lineno) for n in (*functions, *classes))
        for length, start in [*((size, at) for size, at in spans if at <= line <= at + size), (10**6, 0)]:
            inside = (tests for at, tests in lines.items() if at in called and start <= at <= start + length)
            found = found or set().union(*inside)
        found = found or lines.get(line, set())  # a file without functions
    seconds = measured["seconds"]
    return sorted((t for t in found if t in seconds), key=lambda t: seconds[t])


def within(tests: list[str], seconds: dict[str, float], room: float) -> list[str]:
    """The quickest tests that fit into the time, and at least one."""
    taken, used = tests[:1], 0.0
    for test in tests[1:MOST]:
        used += seconds[test]
        if used > room:
            break
        taken.append(test)
    return taken


class Until:
    """A plugin of pytest: no test begins after this time."""

    def __init__(self, end: float) -> None:
        self.end = end

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if time.monotonic() > self.end else None


def run(copy: Path, tests: list[str], limit: float, log: Path, marks: str = FAST) -> str:
    """``killed``, ``survived`` or ``timeout``, in a child that has the libraries but not earnest.

    No test begins after ``limit`` seconds; a test that is not over ``STUCK`` seconds later hangs.
    """
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            os.chdir(copy)
            parts = ("src", "earnest-audit/src", "")
            others = [p for p in sys.path if p not in ("", *(str(ROOT / part) for part in parts))]
            sys.path[:] = [*(str(copy / part) for part in parts), *others]
            os.environ["PYTHONPATH"] = os.pathsep.join(str(copy / part) for part in parts)
            for name in [m for m in sys.modules if m.split(".")[0] in ("earnest", "earnest_audit", "scripts", "tests")]:
                del sys.modules[name]
            sys.dont_write_bytecode = False  # the next child reads what this one has compiled
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            os.environ["CI"] = "true"  # a test that is skipped because of the change fails
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "-p", "anyio"]
            words = ["-x", "-q", "-m", marks, *plugins, *tests]
            code = int(pytest.main(words, [Until(time.monotonic() + limit)]))
        except BaseException:  # the child must never return into the parent's loop
            code = 70
        os._exit(code)
    end = time.monotonic() + limit + STUCK
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            # 1: a test failed; 2 and 4: a file could not be imported; 5: there was no test; 70: pytest did not run.
            assert code not in (5, 70), log.read_text(errors="replace")[-2000:]
            return "killed" if code else "survived"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def first_failure(log: Path) -> str:
    """The test in pytest's summary; other lines that begin with ERROR are of the log that a test captured."""
    lines = log.read_text(errors="replace").splitlines()
    named = (line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/")))
    return next((line.split(" ", 1)[1].split(" - ")[0] for line in named), "")


def judge(package: str, each: int, room: float, copy: Path, measured: dict[str, Any], again: bool) -> None:
    out = OUT / f"{package}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    known = {r["key"]: r for r in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    failures: set[str] = set()
    for file, change in plan(package, each):
        tree = ast.parse((ROOT / file).read_text())
        mutant = change.applied(tree)
        key = hashlib.sha256(f"{file}\n{mutant.source}".encode()).hexdigest()[:16]
        all_tests = executing(measured, file, tree, change.line)
        tests = within(all_tests, measured["seconds"], room)
        old = known.get(key)
        alive = old is not None and old["fate"] in ("survived", "no tests") and key not in equivalent
        if old is not None and not (again and alive and all_tests):
            continue
        fate, failed = "no tests", ""
        if tests:
            target, log = copy / file, copy / "build/mutant.log"
            log.parent.mkdir(exist_ok=True)
            target.write_text(mutant.source)
            try:
                fate = run(copy, tests, 4 * room, log)
            finally:
                shutil.copy2(ROOT / file, target)
            failed = first_failure(log)
            failures |= {failed} - {""}
        result = {"file": str(file), "line": change.line, "what": change.what, "operator": change.operator,
                  "fate": fate, "by": failed, "tests": len(tests), "of": len(all_tests), "key": key}  # fmt: skip
        with out.open("a") as stream:
            stream.write(json.dumps(result) + "\n")
        print(
            f"{package} {fate:9} {file}:{change.line} {change.what} [{len(tests)}/{len(all_tests)}] {failed}",
            flush=True,
        )
    if failures:
        log = copy / "build/mutant.log"
        assert run(copy, sorted(failures), 40 * room, log) == "survived", (
            f"fails without a change: {first_failure(log)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--each", type=int, default=15)
    parser.add_argument("--room", type=float, default=15.0, help="seconds of tests for one mutant, as measured")
    parser.add_argument("--again", action="store_true", help="run survivors again, with the tests of today")
    words = parser.parse_args()
    with project() as copy:
        for package in words.packages:
            judge(package, words.each, words.room, copy, coverage.load(), words.again)


@contextmanager
def project() -> Iterator[Path]:
    """A copy of the project for mutants, in a process that has imported what most tests import: children inherit it."""
    for name in ("beartype", "fastapi.testclient", "hypothesis", "jaxtyping", "rich.progress", "typer.testing"):
        importlib.import_module(name)
    import torch
    import transformers

    torch.set_num_threads(1)
    nano = ROOT / "src/earnest/models/nano"
    transformers.AutoModelForCausalLM.from_pretrained(nano)
    transformers.AutoTokenizer.from_pretrained(nano)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "earnest"
        shutil.copytree(
            ROOT, copy, ignore=lambda where, names: ANYWHERE(where, names) | ({"build"} & set(names)), symlinks=True
        )
        for environment in ROOT.glob(".venv*"):
            (copy / environment.name).symlink_to(environment.resolve())
        yield copy


if __name__ == "__main__":
    main()

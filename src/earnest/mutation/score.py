"""Run a project's tests against every mutant of a part of its code: one at a time, in a copy, with a time limit.

A mutant that no test detects survives. Some survivors are equivalent to the original (a bound that no input reaches),
so survivors are read before tests are written for them. Each result is one line of a JSON-lines file; a run that was
stopped continues from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from earnest.errors import EarnestError
from earnest.mutation.operators import Mutant, mutants
from earnest.report.markup import time_left

Fate = Literal["killed", "timeout", "survived"]
ANYWHERE = shutil.ignore_patterns(
    ".git", ".venv*", "venv", "__pycache__", ".*_cache", ".hypothesis", "node_modules", "*.egg-info"
)
RESULTS = {"runs", "wandb", "mlruns"}
"""Folders in a project's root that are not copied, since they may be large. Deeper folders of these names are code."""
SLACK = 5.0  # a mutant may take this many times the duration of the tests on the original


class MutationError(EarnestError):
    """The tests cannot be scored: they fail on the original, there are none, or there is nothing to mutate."""


@dataclass(frozen=True)
class Outcome:
    """The result of one mutant."""

    file: str
    line: int
    what: str
    fate: Fate
    key: str


@dataclass(frozen=True)
class Score:
    outcomes: tuple[Outcome, ...]

    @property
    def survivors(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.fate == "survived")

    @property
    def share(self) -> float:
        """The share of mutants that a test detected."""
        return 1 - len(self.survivors) / len(self.outcomes) if self.outcomes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"share": self.share, "outcomes": [asdict(o) for o in self.outcomes]}

    def table(self) -> str:
        """Markdown, one row per file."""
        lines = ["| file | mutants | killed | survived | score |", "|---|---|---|---|---|"]
        for file in sorted({o.file for o in self.outcomes}):
            mine = [o for o in self.outcomes if o.file == file]
            alive = sum(o.fate == "survived" for o in mine)
            share = 1 - alive / len(mine)
            lines.append(f"| `{file}` | {len(mine)} | {len(mine) - alive} | {alive} | {share:.0%} |")
        return "\n".join(lines)


def score_tests(
    tests: Path,
    source: Path,
    *,
    root: Path | None = None,
    out: Path | None = None,
    limit: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Score:
    """Mutate ``source`` (a file or a folder) and run ``tests`` on each mutant; ``limit``: N mutants, evenly spread."""
    root = (root or Path.cwd()).resolve()
    say = progress or (lambda _: None)
    files = [_inside(f, root) for f in ([source] if source.is_file() else sorted(source.rglob("*.py")))]
    if not files:
        raise MutationError(f"there is no Python file at {str(source)!r} to mutate.")
    place = _inside(tests, root)
    if not tests.exists():
        raise MutationError(f"there are no tests at {str(tests)!r}.")
    plan = [(f, m) for f in files for m in mutants((root / f).read_text()) if _compiles(m)]
    if not plan:
        raise MutationError(f"nothing in {str(source)!r} can be mutated.")
    if limit is not None and limit < len(plan):
        plan = [plan[i * len(plan) // limit] for i in range(limit)]
    done = {o.key: o for o in stored(out)}
    results: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / root.name
        shutil.copytree(root, copy, ignore=lambda place, names: _left_out(root, place, names), symlinks=True)
        room = _baseline(copy, place)
        began, known = time.monotonic(), len(done)
        for number, (file, mutant) in enumerate(plan, 1):
            key = hashlib.sha256(f"{file}\n{mutant.source}".encode()).hexdigest()[:16]
            if key not in done:
                done[key] = Outcome(str(file), mutant.line, mutant.what, _try(copy, file, mutant, place, room), key)
                _store(out, done[key])
            results.append(done[key])
            left = time_left(time.monotonic() - began, len(done) - known, len(done) - known + len(plan) - number)
            say(f"{number}/{len(plan)}{left} {file}:{mutant.line} {mutant.what}: {done[key].fate}")
    return Score(tuple(results))


def _left_out(root: Path, place: str, names: list[str]) -> set[str]:
    return ANYWHERE(place, names) | (RESULTS & set(names) if Path(place) == root else set())


def _inside(path: Path, root: Path) -> Path:
    resolved = path.resolve()
    if not resolved.is_relative_to(root):
        raise MutationError(f"{str(path)!r} is not inside {str(root)!r}; run this from the root of the project.")
    return resolved.relative_to(root)


def _compiles(mutant: Mutant) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # `1 is x` is a mutant like any other
            compile(mutant.source, "<mutant>", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _baseline(copy: Path, tests: Path) -> float:
    """Run the tests on the original, where they must pass; return the time limit of a mutant in seconds."""
    begin = time.perf_counter()
    code, text = _pytest(copy, tests, None)
    if code == 5:
        raise MutationError(f"pytest finds no test in {str(tests)!r}.")
    if code:
        raise MutationError(f"the tests fail before anything is changed (exit {code}): {text.strip()[-400:]}")
    return 10 + SLACK * (time.perf_counter() - begin)


def _try(copy: Path, file: Path, mutant: Mutant, tests: Path, room: float) -> Fate:
    target = copy / file
    original = target.read_text()
    target.write_text(mutant.source)
    try:
        code, _ = _pytest(copy, tests, room)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        target.write_text(original)
    return "killed" if code else "survived"


def _pytest(copy: Path, tests: Path, room: float | None) -> tuple[int, str]:
    path = os.pathsep.join([str(copy / "src"), str(copy), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(
        command, cwd=copy, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=room,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def stored(out: Path | None) -> Iterator[Outcome]:
    """The results of an earlier run."""
    if out is not None and out.exists():
        for line in out.read_text().splitlines():
            if line.endswith("}"):  # a mutant with an incomplete last line is run again
                yield Outcome(**json.loads(line))


def _store(out: Path | None, outcome: Outcome) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

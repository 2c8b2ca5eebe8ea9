"""Which test executes which line of src: coverage with one context per test, also in the processes that a test starts.

    python -m scripts.mutants.coverage tests/runs tests/data …

One pytest run per argument; each writes build/mutants/NAME.json with ``seconds`` (test → duration) and ``lines``
(file → line → numbers of tests in the order of ``seconds``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.pins import ROOT

FOLDER = ROOT / "build/mutants"
SETTINGS = """\
[run]
source = {source}
data_file = {data}
parallel = true
context = ${{EARNEST_TEST-}}
concurrency = thread
disable_warnings = module-not-imported,no-data-collected,couldnt-parse,dynamic-conflict
"""


class Clock:
    """A plugin of pytest: switches the context to each test and takes its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import coverage

        running = coverage.Coverage.current()
        assert running is not None, "the startup file did not start coverage"
        running.switch_context(item.nodeid)
        os.environ["EARNEST_TEST"] = item.nodeid
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.perf_counter() - begin, 3)
            os.environ["EARNEST_TEST"] = ""
            running.switch_context("")


def measure(tests: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        source = f"{ROOT}/src,{ROOT}/earnest-audit/src"
        (work / "settings").write_text(SETTINGS.format(source=source, data=work / "data"))
        path = os.pathsep.join(
            [
                folder,
                str(ROOT / "src"),
                str(ROOT / "earnest-audit" / "src"),
                str(ROOT),
                os.environ.get("PYTHONPATH", ""),
            ]
        )
        environment = {"COVERAGE_PROCESS_START": str(work / "settings"), "EARNEST_TEST": "", "PYTHONPATH": path}
        subprocess.run(
            [sys.executable, "-m", "scripts.mutants.coverage", "--one", tests, str(work / "seconds.json")],
            cwd=ROOT, env=os.environ | environment, check=False,
        )  # fmt: skip
        write(tests, json.loads((work / "seconds.json").read_text()), sorted(work.glob("data.*")))


def write(tests: str, seconds: dict[str, float], data: list[Path]) -> None:
    """Put the data files of one run together."""
    import coverage

    lines: dict[str, dict[str, list[int]]] = {}
    numbers = {test: number for number, test in enumerate(seconds)}
    for path in data:
        read = coverage.CoverageData(str(path))
        read.read()
        for file in read.measured_files():
            mine = lines.setdefault(str(Path(file).relative_to(ROOT)), {})
            for line, contexts in read.contexts_by_lineno(file).items():
                known = mine.setdefault(str(line), [])
                known += {numbers[c] for c in contexts if c in numbers} - set(known)
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = tests.strip("/").replace("/", "_")
    (FOLDER / f"{name}.json").write_text(json.dumps({"seconds": seconds, "lines": lines}))


def load() -> dict[str, Any]:
    """All that was measured, together."""
    found: dict[str, Any] = {"seconds": {}, "lines": {}}
    for path in sorted(FOLDER.glob("*.json")):
        one = json.loads(path.read_text())
        found["seconds"] |= one["seconds"]
        names = list(one["seconds"])
        for file, lines in one["lines"].items():
            mine = found["lines"].setdefault(file, {})
            for line, tests in lines.items():
                mine.setdefault(int(line), set()).update(names[number] for number in tests)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        clock = Clock()
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "-m", "not slow and not vllm and not browser", sys.argv[2]], [clock]
        )
        Path(sys.argv[3]).write_text(json.dumps(clock.seconds))
    else:
        for argument in sys.argv[1:]:
            measure(argument)

"""Changes that undo a fix, each with the test that was written for it: every one has to fail.

    python -m scripts.mutants.points [POINT…] [--again]
    python -m scripts.mutants.points --table

benchmarks/results/mutation/points.json has, for points of the issue "Mend", a file, the text ``old`` in it, the text
``new`` in its place, what this undoes, and a test. Each change is made alone in a copy of the project; ``failed`` is
whether the test then fails. One that is there is not run again, except with ``--again``. A test that failed is run
once more without a change, and has to pass.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.mutants.judge import OUT, first_failure, project, run
from scripts.pins import ROOT

POINTS = OUT.parent / "points.json"
ANY = "not slow and not vllm"  # tests in a browser, too
LIMIT = 300.0


def look(points: list[dict[str, Any]], wanted: set[int], again: bool, copy: Path) -> None:
    log = copy / "build/mutant.log"
    log.parent.mkdir(exist_ok=True)
    failed: set[str] = set()
    for one in points:
        if one["point"] not in wanted or ("failed" in one and not again):
            continue
        target = copy / one["file"]
        text = target.read_text()
        assert text.count(one["old"]) == 1, f"{one['file']} has {one['old']!r} {text.count(one['old'])} times"
        target.write_text(text.replace(one["old"], one["new"]))
        try:
            one["failed"] = run(copy, [one["test"]], LIMIT, log, ANY) != "survived"
        finally:
            shutil.copy2(ROOT / one["file"], target)
        failed |= {one["test"]} if one["failed"] else set()
        POINTS.write_text(json.dumps(points, indent=1, ensure_ascii=False) + "\n")
        print(f"{one['point']} {one['what']}: {'fails' if one['failed'] else 'PASSES'} {one['test']}", flush=True)
    if failed:
        fate = run(copy, sorted(failed), 10 * LIMIT, log, ANY)
        assert fate == "survived", f"fails without a change: {first_failure(log)}"
        print(f"{len(failed)} tests pass without a change", flush=True)


def rows(points: list[dict[str, Any]]) -> Iterable[str]:
    yield "| point | what was undone | file | test | failed |"
    yield "|---|---|---|---|---|"
    for one in points:
        file = one["file"].removeprefix("src/earnest/").replace("serve/dashboard/assets/", "dashboard: ")
        test = one["test"].removeprefix("tests/").replace("::test_", "::")
        fate = {True: "yes", False: "**no**", None: "not run"}[one.get("failed")]
        yield f"| {one['point']} | {one['what']} | `{file}` | `{test}` | {fate} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", nargs="*", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    points: list[dict[str, Any]] = json.loads(POINTS.read_text())
    if words.table:
        print("\n".join(rows(points)))
        return
    with project() as copy:
        look(points, set(words.points) or {one["point"] for one in points}, words.again, copy)


if __name__ == "__main__":
    main()

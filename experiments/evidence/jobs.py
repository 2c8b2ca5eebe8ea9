"""Jobs of a table: each trained once, kept as a JSON file, and gathered into one result."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from earnest.disk import write_json

RESULTS = Path("experiments/results")
IMAGES = Path("docs/images/evidence")
Record = dict[str, Any]
Jobs = Mapping[str, Callable[[], Record]]
"""Name → a function that trains and returns JSON."""


def main(
    name: str,
    jobs: Callable[[Path], Jobs],
    tables: Callable[[Sequence[Record]], Sequence[str]],
    figure: Callable[[Sequence[Record], Path], None],
    arguments: Sequence[str] | None = None,
) -> None:
    """The command of a table. ``jobs`` gets the folder of the outputs."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.evidence.{name}")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence") / name, help="folder of the finished jobs")
    parser.add_argument("--only", default="", help="train only jobs whose name contains this text")
    parser.add_argument("--anew", action="store_true", help="train also the jobs that are in the stored results")
    parser.add_argument("--table", action="store_true", help="print the tables of the stored results")
    args = parser.parse_args(arguments)
    stored = RESULTS / f"{name}.json"
    if not args.table:
        kept = json.loads(stored.read_text())["jobs"] if stored.exists() and not args.anew else []
        write_json(stored, gather(jobs(args.out), args.out, args.only, kept))
    found = json.loads(stored.read_text())
    if not found["jobs"]:
        raise SystemExit(f"no job of {name} is finished; missing: {', '.join(found['missing'])}")
    if not args.table:
        IMAGES.mkdir(parents=True, exist_ok=True)
        figure(found["jobs"], IMAGES / f"{name}.png")
    print("\n\n".join(tables(found["jobs"])))
    print(f"\nmissing jobs: {', '.join(found['missing']) or 'none'}")


def gather(jobs: Jobs, out: Path, only: str, kept: Sequence[Record] = ()) -> Record:
    """Train the jobs that are not there yet; the records of all that are, and the names of the others.

    A job is there if ``out`` has its file, or if ``kept`` (results of another machine) has its record.
    """
    out.mkdir(parents=True, exist_ok=True)
    found, missing = [], []
    for record in kept:
        path = out / f"{record['job']}.json"
        if record["job"] in jobs and not path.exists():
            write_json(path, record)
    for name, make in jobs.items():
        path = out / f"{name}.json"
        if not path.exists() and only in name:
            begun = time.monotonic(), cpu_seconds()
            record = make()
            spent = {"seconds": time.monotonic() - begun[0], "cpu_seconds": cpu_seconds() - begun[1]}
            write_json(path, {"job": name, **record, **spent})
            print(f"{name}: {spent['seconds']:.0f} s", file=sys.stderr, flush=True)
        if path.exists():
            found.append(json.loads(path.read_text()))
        else:
            missing.append(name)
    return {"jobs": found, "missing": missing}


def cpu_seconds() -> float:
    """Of this process and of the processes that it started and that ended."""
    return sum(os.times()[:4])


def by(records: Sequence[Record], key: str) -> dict[Any, list[Record]]:
    """The records by the value of a key, in the order of its first appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record[key], []).append(record)
    return groups


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard deviation; of one value no deviation."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def plots(columns: int, width: float = 6.5, height: float = 4.5) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * columns, height)
    made, axes = pyplot.subplots(1, columns, figsize=size, dpi=110, layout="constrained", squeeze=False)
    return made, list(axes[0])


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

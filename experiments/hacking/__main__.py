"""python -m experiments.hacking [RESULTS.json | FOLDER] [FIGURE.png]: print the tables, draw the figure."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.hacking.figure import write_figure
from experiments.hacking.results import read
from experiments.hacking.tables import levels, tables

COMMITTED = Path("benchmarks/results/hacking.json")


def main(arguments: list[str]) -> None:
    results = read(Path(arguments[0]) if arguments else COMMITTED)
    for title, lines in tables(results).items():
        print(f"{title}\n")
        print("\n".join(lines), end="\n\n")
    print(f"matched solve rates: {levels(results)}; missing jobs: {', '.join(results['missing']) or 'none'}")
    if len(arguments) > 1:
        print(write_figure(results, Path(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The time of `import earnest` beyond `import torch`, and of `earnest --help`.

    python benchmarks/import_time.py [--repeats 7]

Each is a new process. The best of the repeats is the cost, the median shows the noise, and the CPU seconds are the cost
on an otherwise idle machine. The project's bounds are 0.3 s beyond torch and 0.5 s for the help. This script does not
fail above them; tests/meta/test_import_cost.py tests which modules are imported.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def seconds(command: list[str], repeats: int) -> dict[str, float]:
    taken, busy = [], []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), _children()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
        busy.append(_children() - cpu)
    return {"best": min(taken), "median": statistics.median(taken), "cpu": min(busy)}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    python = [sys.executable, "-c"]
    runs = {
        "`python -c pass`": seconds([*python, "pass"], repeats),
        "`import torch`": seconds([*python, "import torch"], repeats),
        "`import torch, earnest`": seconds([*python, "import torch, earnest"], repeats),
        "`import earnest`": seconds([*python, "import earnest"], repeats),
        "`earnest --help`": seconds([str(Path(sysconfig.get_path("scripts")) / "earnest"), "--help"], repeats),
    }
    print("| what | best s | median s | CPU s |\n|---|---|---|---|")
    for name, row in runs.items():
        print(f"| {name} | {row['best']:.2f} | {row['median']:.2f} | {row['cpu']:.2f} |")
    over = {key: runs["`import torch, earnest`"][key] - runs["`import torch`"][key] for key in ("best", "cpu")}
    answer = runs["`earnest --help`"]
    print(f"\nearnest over torch: {over['best']:.2f} s, CPU {over['cpu']:.2f} s (bound 0.3)")
    print(f"earnest --help: {answer['best']:.2f} s, CPU {answer['cpu']:.2f} s (bound 0.5)")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "import_time.json").write_text(
        json.dumps({"repeats": repeats, "seconds": runs, "over_torch": over}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()

"""What importing costs: `import earnest` over `import torch`, and how soon `earnest --help` answers.

    python benchmarks/import_time.py [--repeats 7]

Each is a fresh process; the best of the repeats is the cost, the median shows the noise. The bounds are the project's:
0.3 s over torch, 0.5 s for the help. Nothing fails here; tests/meta/test_import_cost.py tests the cause, not the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def seconds(command: list[str], repeats: int) -> dict[str, float]:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
    return {"best": min(taken), "median": statistics.median(taken)}


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
    print("| what | best s | median s |\n|---|---|---|")
    for name, row in runs.items():
        print(f"| {name} | {row['best']:.2f} | {row['median']:.2f} |")
    over = runs["`import torch, earnest`"]["best"] - runs["`import torch`"]["best"]
    print(f"\nearnest over torch: {over:.2f} s (bound 0.3); help: {runs['`earnest --help`']['best']:.2f} s (bound 0.5)")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "import_time.json").write_text(
        json.dumps({"repeats": repeats, "seconds": runs, "over_torch": over}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()

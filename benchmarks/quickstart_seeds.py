"""The quickstart on five seeds: held-out reward before and after, and the gain, with standard errors.

    python benchmarks/quickstart_seeds.py [--seeds 5] [--out benchmarks/results] [key=value …]

Each seed is a separate process (`earnest run quickstart seed=S`), one after the other, measured on the same held-out
prompts with the same sampling seeds. Writes quickstart_seeds.json and .md; exits with 1 if the gain of a seed is below
5 of its standard errors.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from earnest.runs.comparison import gain

SURE = 5.0
"""The smallest gain in standard errors; by chance it occurs less than once in a million."""


def run(seed: int, overrides: list[str], place: Path) -> dict[str, Any]:
    """One seed's numbers, from its run folder."""
    folder = place / f"seed-{seed}"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "earnest.cli", "run", "quickstart", f"seed={seed}", f"out={folder}", *overrides],
        check=True,
    )
    whole = time.perf_counter() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    before, after = evaluations[0], evaluations[-1]
    gained, se = gain(before["means"], after["means"])
    header = json.loads((folder / "run.json").read_text())
    return {
        "seed": seed,
        "model": header["model"],
        "steps": header["steps"],
        "before": before["reward"],
        "before_se": before["se"],
        "after": after["reward"],
        "after_se": after["se"],
        "gain": gained,
        "gain_se": se,
        "sigmas": gained / se if se else None,
        "prompts": after["prompts"],
        "n": after["n"],
        "verdict": json.loads((folder / "verdict.json").read_text())["holds"],
        "training_seconds": header["seconds"],
        "whole_seconds": whole,
        "threads": json.loads((folder / "environment.json").read_text())["threads"],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    head = "| seed | held-out before | after | gain | gain / s.e. | training |\n|---|---|---|---|---|---|"
    body = [
        f"| {r['seed']} | {r['before']:.3f} ± {r['before_se']:.3f} | {r['after']:.3f} ± {r['after_se']:.3f} "
        f"| {r['gain']:+.3f} ± {r['gain_se']:.3f} | {r['sigmas']:.1f} | {r['training_seconds']:.0f} s |"
        for r in rows
    ]
    return "\n".join([head, *body])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("overrides", nargs="*", help="key=value, as for `earnest run`")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = [run(seed, asked.overrides, Path(place)) for seed in range(asked.seeds)]
    table = markdown(rows)
    asked.out.mkdir(parents=True, exist_ok=True)
    data = {
        "rows": rows,
        "overrides": asked.overrides,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    (asked.out / "quickstart_seeds.json").write_text(json.dumps(data, indent=1) + "\n")
    (asked.out / "quickstart_seeds.md").write_text(table + "\n")
    print(table)
    weak = [r["seed"] for r in rows if r["sigmas"] is None or r["sigmas"] < SURE or not r["verdict"]]
    if weak:
        print(f"not sure of the gain of seeds {weak}", file=sys.stderr)
    return 1 if weak else 0


if __name__ == "__main__":
    sys.exit(main())

"""This tree beside an earlier commit on the same benchmarks, by turns: did a change of the code's structure cost speed?

    python benchmarks/editions.py [--commit 83a89f9] [--rounds 3] [--seeds 5] [--only import grpo]
    python benchmarks/editions.py --table

The commit (the end of the first edition) is checked out in a temporary worktree. Each round runs every benchmark once
per tree, the order alternating, each in a new process with one thread, by that tree's own script. The best of the
rounds counts; "spread" is the median of the rounds over the best, which is the noise. The ratio is earlier ÷ now, so
above 1 this tree is faster. The quickstart's seeds run once per tree, and their rewards are compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = "83a89f9"
VARIANTS = ("lora", "dora", "hra", "ia3", "road", "antipasto")
SIZE = ("--tokens", "512", "--width", "512", "--vocabulary", "49152", "--threads", "1", "--repeats", "2")
Numbers = dict[str, float]


def run(tree: Path, *words: str) -> str:
    """What the command prints, with the packages of the tree."""
    paths = [str(tree / "src"), str(tree / "earnest-audit" / "src"), str(tree)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed in {tree}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def python(tree: Path, *words: str) -> str:
    return run(tree, sys.executable, *words)


def written(tree: Path, *words: str) -> Any:
    """The JSON that a benchmark writes to its ``--out``."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        python(tree, *words, "--out", str(out))
        return json.loads(out.read_text())


def imports(tree: Path) -> Numbers:
    started = time.perf_counter()
    python(tree, "-c", "import earnest")
    middle = time.perf_counter()
    run(tree, str(Path(sysconfig.get_path("scripts")) / "earnest"), "--help")
    return {"`import earnest`": middle - started, "`earnest --help`": time.perf_counter() - middle}


def grpo(tree: Path) -> Numbers:
    lines = python(tree, "benchmarks/grpo_step.py", "--side", "earnest", "--steps", "20").splitlines()
    found = json.loads(next(line for line in lines if line.startswith("RESULT ")).removeprefix("RESULT "))
    return {"GRPO step, nano": found["median_seconds"]}


def objectives(tree: Path) -> Numbers:
    found = written(tree, "benchmarks/objectives.py", "--impls", "earnest", *SIZE)["results"]
    return {f"objective {name.partition('/')[0]}": one["seconds"] for name, one in found.items()}


def adapters(tree: Path) -> Numbers:
    words = ["benchmarks/adapters.py", "--tables", "layer", "--repeats", "3", "--only", *VARIANTS]
    return {f"adapter {one['variant']}": one["earnest_ms"] / 1e3 for one in written(tree, *words)["layer"]}


BENCHMARKS: dict[str, Callable[[Path], Numbers]] = {
    "import": imports, "grpo": grpo, "objectives": objectives, "adapters": adapters,
}  # fmt: skip


def quickstart(tree: Path, seeds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        python(tree, "benchmarks/quickstart_seeds.py", "--seeds", str(seeds), "--out", place, "threads=1")
        found = json.loads((Path(place) / "quickstart_seeds.json").read_text())
    return list(found["rows"])


@contextmanager
def checked_out(commit: str) -> Any:
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(trees: dict[str, Path], rounds: int, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """Benchmark → tree → the seconds of each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in names:
            for side in list(trees)[:: 1 if number % 2 else -1]:
                for what, seconds in BENCHMARKS[name](trees[side]).items():
                    found.setdefault(what, {}).setdefault(side, []).append(seconds)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    lines = [
        f"| best of {result['rounds']} | {result['commit']}, ms | now, ms | ratio | spread, both |",
        "|---|---|---|---|---|",
    ]
    for what, sides in result["seconds"].items():
        best = [min(sides[side]) for side in ("earlier", "now")]
        spread = [statistics.median(sides[side]) / min(sides[side]) for side in ("earlier", "now")]
        cells = [
            what,
            *(f"{1e3 * b:.0f}" for b in best),
            f"{best[0] / best[1]:.2f}",
            " ".join(f"{s:.2f}" for s in spread),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if result["quickstart"]:
        lines += [
            "",
            "| quickstart | seeds | held-out reward before | after | training, s, median |",
            "|---|---|---|---|---|",
        ]
        for side, rows in result["quickstart"].items():
            cells = [side, str(len(rows)), *(_spread([r[k] for r in rows]) for k in ("before", "after"))]
            cells.append(f"{statistics.median(r['training_seconds'] for r in rows):.0f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=FIRST)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5, help="of the quickstart; 0: none")
    parser.add_argument("--only", nargs="*", choices=tuple(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/editions.json")
    parser.add_argument("--table", action="store_true", help="print the table of --out instead of running")
    args = parser.parse_args()
    if not args.table:
        with checked_out(args.commit) as earlier:
            trees = {"earlier": earlier, "now": ROOT}
            load = os.getloadavg()[0]
            seconds = measure(trees, args.rounds, args.only)
            learned = {side: quickstart(tree, args.seeds) for side, tree in trees.items()} if args.seeds else {}
        result = {
            "commit": args.commit,
            "rounds": args.rounds,
            "load_before": load,
            "seconds": seconds,
            "quickstart": learned,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()

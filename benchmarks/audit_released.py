"""Audit what other libraries release: verl's losses and advantages, torchtune's losses, collators, schedule and
recipes, tinker-cookbook's losses and schedules, prime-rl's losses, PEFT's adapters, TRL's trainers.

    python -m benchmarks.audit_released [--library NAME] [--out benchmarks/results/audit_released.json] [--table]
    python -m benchmarks.audit_released --library trl --show "GRPO, entropy bonus"     # one of them, with its verdict

Each library gets an environment of its own in ``.peers/NAME`` over this one's torch. verl and torchtune are installed
without their dependencies, of which only those are added that importing the losses needs. prime-rl is not on PyPI:
``PRIME_RL`` names a checkout. A failure of the audit is a lead and not yet a finding: each is checked by hand, and what
is left is in docs/findings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the small models are the tests' own

from benchmarks.audit_peers import ROOT, environment
from benchmarks.released.adapters import peft
from benchmarks.released.small import prime_rl, tinker_cookbook
from benchmarks.released.torchtune import torchtune
from benchmarks.released.trainers import trl
from benchmarks.released.verl import verl
from earnest_audit import audit

RESULTS = Path(__file__).parent / "results" / "audit_released.json"
Named = Iterator[tuple[str, Callable[[], Any]]]


LIBRARIES: dict[str, tuple[Callable[[], Named], str, tuple[str, ...]]] = {
    "peft": (peft, "peft", ()),
    "prime-rl": (prime_rl, "", ()),
    "tinker-cookbook": (tinker_cookbook, "tinker-cookbook", ("tinker-cookbook", "tinker", "chz", "blobfile", "lxml",
                                                             "termcolor")),
    "torchtune": (torchtune, "torchtune", ("torchtune", "torchao==0.11.0", "torchdata==0.11.0", "omegaconf",
                                           "antlr4-python3-runtime==4.9.*", "blobfile", "kagglehub", "sentencepiece",
                                           "tiktoken")),
    "trl": (trl, "trl", ()),
    "verl": (verl, "verl", ("verl", "tensordict", "omegaconf", "antlr4-python3-runtime==4.9.*", "codetiming", "pyvers",
                            "hydra-core", "orjson", "cloudpickle", "ray", "msgpack")),
}  # fmt: skip
"""library -> what is audited, its distribution, and what is installed without dependencies."""


def apply(library: str) -> dict[str, Any]:
    things, package, _ = LIBRARIES[library]
    rows = []
    for name, make in things():
        begun = time.perf_counter()
        row: dict[str, Any] = {"what": name}
        try:
            verdict = audit(make())
            row["checked"] = sum(f.outcome == "holds" for f in verdict.findings)
            row["failures"] = [str(f) for f in verdict.failures]
            row["errors"] = [f.measured for f in verdict.errors]
        except Exception as error:
            row |= {"checked": 0, "failures": [], "errors": [f"{type(error).__name__}: {error}"[:300]]}
        rows.append({**row, "seconds": round(time.perf_counter() - begun, 2)})
        print(library, name, row["failures"] or row["errors"] or f"{row['checked']} hold", file=sys.stderr, flush=True)
    known = version(package) if package else subprocess.check_output(
        ["git", "-C", os.environ["PRIME_RL"], "rev-parse", "HEAD"], text=True
    ).strip()  # fmt: skip
    return {"version": known, "rows": rows}


def tables(results: Mapping[str, Any]) -> None:
    print("| library | version | audited | checks that hold | with a failure | could not be audited |")
    print("|---|---|---|---|---|---|")
    for library, result in results.items():
        rows = result["rows"]
        held, failed = sum(r["checked"] for r in rows), sum(bool(r["failures"]) for r in rows)
        not_run = sum(not r["checked"] and not r["failures"] for r in rows)
        print(f"| {library} | {result['version'][:12]} | {len(rows)} | {held} | {failed} | {not_run} |")
    print("\n| library | what | the audit's failures |\n|---|---|---|")
    for library, result in results.items():
        for row in result["rows"]:
            if row["failures"]:
                brief = "; ".join(f.split(":")[0] for f in row["failures"])
                print(f"| {library} | {row['what']} | {brief} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", action="append", choices=list(LIBRARIES))
    parser.add_argument("--here", choices=list(LIBRARIES), help="audit one library in this process, print its JSON")
    parser.add_argument(
        "--show", metavar="WHAT", help="audit this alone, by its name in the table, and print its verdict"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the tables of recorded results, run nothing")
    args = parser.parse_args()
    if args.show and not args.here and len(args.library or ()) != 1:
        parser.error("--show needs one --library.")
    if args.here and args.show:
        named = dict(LIBRARIES[args.here][0]())
        if args.show not in named:
            parser.error(f"{args.here} has no {args.show!r}; it has {', '.join(named)}.")
        print(audit(named[args.show]()))
        return
    if args.here:
        out, sys.stdout = sys.stdout, sys.stderr
        json.dump(apply(args.here), out)
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for library in [] if args.table else args.library or list(LIBRARIES):
        python = environment(library, LIBRARIES[library][2])
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "earnest-audit" / "src")])
        command, env = (
            [python, Path(__file__), "--here", library],
            os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        if args.show:
            sys.exit(subprocess.run([*command, "--show", args.show], check=False, env=env).returncode)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        results[library] = json.loads(done.stdout)
        args.out.write_text(json.dumps({n: results[n] for n in LIBRARIES if n in results}, indent=1) + "\n")
    tables(results)


if __name__ == "__main__":
    main()

"""TrainCheck on the corpus of ``audit_peers``: it learns invariants from a healthy run and checks another run by them.

    python -m benchmarks.audit_traincheck [--limit N] [--out benchmarks/results/audit_peers.json]

The healthy run of a defect is its own fix, which is the best reference that a user could have. The runs that are
checked are the defect, and the fix again with its rows in another order: what is reported there is a false alarm. Each
run is a script of six updates, in processes of TrainCheck's own; only defects that are a step have one. ``--limit``
takes an evenly spread sample; cases that are recorded in ``--out`` are not run again. The seconds are processor time,
of one case (the defect or the fix).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the corpus is the tests' own

from benchmarks.audit_peers import RESULTS, ROOT, corpus, environment, text
from earnest_audit import Step

ASK = "from importlib.metadata import version; print(version('traincheck'))"
SCRIPT = """
import sys
sys.path[:0] = {path!r}
import torch
from torch import Tensor
from benchmarks.audit_peers import Whole, corpus, optimizer_of
step = next(make for name, kind, make in corpus() if (name, kind) == ({case!r}, {kind!r}))()
if {permuted!r}:
    order = torch.randperm(step.rows, generator=torch.Generator().manual_seed(5))
    whole_rows = [k for k, t in step.batch.items() if isinstance(t, Tensor) and t.ndim and len(t) == step.rows]
    step.batch = {{**step.batch, **{{k: step.batch[k][order] for k in whole_rows}}}}
model = step.model
whole = Whole(step, outputs=False)
whole.model = model
optimizer = optimizer_of(step)
for _ in range(6):
    optimizer.zero_grad()
    loss = whole()["loss"]
    loss.backward()
    optimizer.step()
"""


def records(text: str) -> Iterator[Any]:
    """The JSON values that stand one after the other in a text."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        found, end = decoder.raw_decode(text)
        yield found
        text = text[end:].strip()


def checked(python: Path, case: str, folder: Path) -> dict[str, Any]:
    """The invariants that fail on the defect, and on the fix with its rows in another order."""
    path = [str(ROOT), str(ROOT / "src"), str(ROOT / "earnest-audit" / "src")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}

    def run(command: str, *words: Any) -> None:
        subprocess.run(
            [python.parent / command, *words], check=True, cwd=folder, env=env, capture_output=True, text=True
        )

    def trace(name: str, kind: str, permuted: bool, *more: Any) -> None:
        script = folder / f"{name}.py"
        script.write_text(SCRIPT.format(path=path, case=case, kind=kind, permuted=permuted))
        run("traincheck-collect", "--pyscript", script, "--models-to-track", "model", "--output-dir", name, *more)

    def violated(name: str) -> list[str]:
        run("traincheck-check", "-f", name, "-i", "invariants.json", "-o", f"{name}-result", "--no-html-report")
        reports = (folder / f"{name}-result").rglob("failed*.log")
        return sorted({found["invariant"]["text_description"] for f in reports for found in records(f.read_text())})

    trace("reference", "fixed", False)
    run("traincheck-infer", "-f", "reference", "-o", "invariants.json")
    found = {}
    for kind, permuted in (("broken", False), ("fixed", True)):
        trace(kind, kind, permuted, "--invariants", "invariants.json")
        found[kind] = violated(kind)
    return found


def processor_time() -> float:
    """Of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    python = environment("traincheck", ["traincheck"], True)
    steps = [
        name for name, kind, make in corpus()
        if kind == "broken" and not name.startswith("reading") and isinstance(make(), Step)
    ]  # fmt: skip
    count = min(args.limit, len(steps))
    chosen = [steps[i * len(steps) // count] for i in range(count)]
    version = subprocess.check_output([python, "-c", ASK], text=True).strip()
    known = json.loads(args.out.read_text()).get("TrainCheck", {"rows": []})["rows"]
    kept = {r["case"] for r in known if r.get("covered", True)}
    rows = {(r["case"], r["kind"]): r for r in known if r["case"] in kept}
    for name in [name for name in chosen if name not in kept]:
        begun, found, more = processor_time(), {"broken": [], "fixed": []}, {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = checked(python, name, Path(folder))
            except subprocess.CalledProcessError as failure:
                more = {"error": f"{Path(failure.cmd[0]).name} ended with {failure.returncode}"}
        seconds = round((processor_time() - begun) / 2, 1)
        print(name, found, more, seconds, file=sys.stderr, flush=True)
        for kind in found:
            own = {"case": name, "kind": kind, "failures": found[kind], "warnings": [], "seconds": seconds, **more}
            rows[name, kind] = {**own, "lines": 5}
        write(args.out, version, rows)


def write(out: Path, version: str, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """The rows of the defects and fixes that were run, in the corpus's order."""
    results = json.loads(out.read_text())
    ran = [rows[name, kind] for name, kind, _ in corpus() if (name, kind) in rows]
    results["TrainCheck"] = {"package": "traincheck", "version": version, "rows": ran}
    out.write_text(text(results))


if __name__ == "__main__":
    main()

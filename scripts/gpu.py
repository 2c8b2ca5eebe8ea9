"""`make gpu`: the tests and benchmarks that depend on the device, and one JSON file to send back.

    python -m scripts.gpu [--out gpu-report.json]

The file has the machine, every test with its outcome and seconds, and the output of every benchmark. Without a CUDA
device the command ends with one sentence.
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
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ("packing.py", "grpo_step.py", "scale.py", "device_syncs.py")


def machine() -> dict[str, Any]:
    """Versions and devices."""
    import torch
    import transformers

    from earnest.version import __version__

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "earnest": __version__,
        "git": _run(["git", "rev-parse", "HEAD"])["output"].strip(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "devices": [{"name": p.name, "bytes": p.total_memory, "capability": [p.major, p.minor]} for p in found],
    }


def _run(command: list[str]) -> dict[str, Any]:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "command": " ".join(command),
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - start, 1),
        "output": done.stdout[-20_000:],
        "errors": done.stderr[-5_000:] if done.returncode else "",
    }


def tests() -> list[dict[str, Any]]:
    """Every test that is marked gpu."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        _run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junit-xml={xml}", "tests"])
        cases = ElementTree.parse(xml).getroot().iter("testcase")
        return [outcome(case) for case in cases]


def outcome(case: ElementTree.Element) -> dict[str, Any]:
    """One test of a JUnit file."""
    ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    return {
        "test": f"{case.get('classname')}::{case.get('name')}",
        "outcome": "passed" if ended is None else ended.tag,
        "seconds": float(case.get("time") or 0),
        "message": "" if ended is None else (ended.get("message") or "")[:2000],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("make gpu: there is no CUDA device here, so nothing was run; start it on a machine with a GPU.")
        return 1
    ran = tests()
    benchmarks = [_run([sys.executable, f"benchmarks/{name}"]) for name in BENCHMARKS]
    found = {"machine": machine(), "tests": ran, "benchmarks": benchmarks}
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    bad = [t for t in ran if t["outcome"] != "passed"]
    print(f"{len(ran)} tests, {len(bad)} not passed; {given.out} has everything: please send it back")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

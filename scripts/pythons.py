"""Check earnest under other Pythons: ``python -m scripts.pythons INTERPRETER... [--tests FILE...]``.

Each interpreter has what `earnest[test]` requires (a virtual environment's, for example). Under each: every file is
compiled with warnings as errors; every module is imported with its deprecation warnings as errors; two steps of the
quickstart are trained; the given tests pass (without the mark `integration`). Exit 1 if something fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "earnest-audit/src", "scripts", "tests", "experiments", "benchmarks")
# In memory, so that nothing is written into the repository.
COMPILE = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error")
files = [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py"))]
for path in files:
    compile(path.read_bytes(), str(path), "exec")
print(len(files), "files compiled")
"""
IMPORT = r"""
import importlib, pkgutil, sys, warnings
warnings.filterwarnings("error", category=DeprecationWarning, module=r"earnest(_audit)?($|\.)")
done, left_out = 0, []
for top in ("earnest_audit", "earnest"):
    for found in pkgutil.walk_packages(importlib.import_module(top).__path__, top + "."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
            done += 1
        except ImportError as error:
            if (error.name or "").partition(".")[0] in ("", "earnest", "earnest_audit"):
                raise
            left_out.append(f"{found.name} (needs {error.name})")
print(done, "modules imported;", "left out:", ", ".join(left_out) or "none")
"""
QUICKSTART = ("run", "quickstart", "steps=2", "eval.prompts=4", "eval.samples=1")


def check(interpreter: str, tests: list[str]) -> list[str]:
    """A line for each check of one interpreter; a failed one starts with FAILED."""
    paths = os.pathsep.join(str(ROOT / place) for place in ("src", "earnest-audit/src", "."))
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    lines = [_last(interpreter, {}, ROOT, "-VV")]
    with tempfile.TemporaryDirectory() as folder:
        place, environment = Path(folder), {"PYTHONPATH": paths, **offline}
        folders = [str(ROOT / name) for name in FOLDERS]
        lines.append(_last(interpreter, environment, place, "-c", COMPILE, *folders))
        lines.append(_last(interpreter, environment, place, "-c", IMPORT))
        words = ("-m", "earnest", *QUICKSTART, f"out={place / 'run'}")
        trained = _last(interpreter, environment, place, *words)
        lines.append(trained if trained.startswith("FAILED") else f"earnest {' '.join(QUICKSTART)}: finished")
        if tests:
            marks = ("-m", "not integration and not slow and not vllm and not gpu")
            cache = ("-p", "no:cacheprovider", f"--basetemp={place / 'tests'}")
            lines.append(_last(interpreter, environment, ROOT, "-m", "pytest", "-q", *marks, *cache, *tests))
    return lines


def _last(interpreter: str, environment: dict[str, str], folder: Path, *words: str) -> str:
    """The last line that the command prints; all of them, after FAILED, if it fails."""
    done = subprocess.run(
        [interpreter, *words],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = done.stdout.strip()
    return text.splitlines()[-1] if done.returncode == 0 and text else f"FAILED ({done.returncode})\n{text[-4000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interpreters", nargs="+")
    parser.add_argument("--tests", nargs="*", default=[])
    words = parser.parse_args()
    lines = []
    for interpreter in words.interpreters:
        for line in check(interpreter, words.tests):
            print(line, flush=True)
            lines.append(line)
    return 1 if any(line.startswith("FAILED") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())

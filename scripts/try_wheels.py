"""Install the built wheels in an empty environment and use them: ``python -m scripts.try_wheels dist``.

Only the package's own dependencies are installed, with the pins of constraints.txt. The commands run outside the
clone, so that no file of the clone can help.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    ("earnest", "--version"),
    ("earnest", "run", "quickstart", "steps=2", "eval.prompts=4", "eval.samples=1", "out=run"),
    ("earnest", "audit", "quickstart"),
    ("earnest", "doctor"),
)


def main(folder: Path) -> None:
    wheels = [str(path.resolve()) for path in folder.glob("*.whl")]
    if not wheels:
        raise SystemExit(f"no wheel in {folder}; run `make wheels`.")
    with tempfile.TemporaryDirectory(prefix="earnest-wheel-") as place:
        environment = Path(place) / "env"
        venv.create(environment, with_pip=True)
        scripts = environment / ("Scripts" if os.name == "nt" else "bin")
        flags = os.environ.get("PIP_FLAGS", "").split()
        _run(
            str(scripts / "python"), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *flags, *wheels
        )
        for command, *words in COMMANDS:
            _run(str(scripts / command), *words, cwd=place)
    print(f"tried: {', '.join(Path(w).name for w in wheels)}")


def _run(*words: str, cwd: str | None = None) -> None:
    print("$", *words, flush=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, cwd=cwd, env=clean, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

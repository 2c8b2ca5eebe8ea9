"""Install the built wheels in empty environments and use them: ``python -m scripts.try_wheels dist``.

earnest-audit is tried first with its own dependencies alone (torch and numpy), then with pytest for its plugin; then
earnest is installed beside it. Pins are those of constraints.txt. The commands run outside the clone, so that no file
of the clone can help.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_the_loop():
    for _ in range(6):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


test_the_loop()
"""
AUDIT = (
    ("earnest-audit", "--version"),
    ("earnest-audit", "laws"),
    ("earnest-audit", "train.py", "--sarif", "out.sarif"),
)
PLUGIN = (("python", "-m", "pytest", "-q", "--audit", "train.py"),)
COMMANDS = (
    ("earnest", "--version"),
    ("earnest", "run", "quickstart", "steps=2", "eval.prompts=4", "eval.samples=1", "out=run"),
    ("earnest", "audit", "quickstart"),
    ("earnest", "doctor"),
)


def main(folder: Path) -> None:
    wheels = {path.name.split("-")[0]: str(path.resolve()) for path in folder.glob("*.whl")}
    missing = {"earnest", "earnest_audit"} - wheels.keys()
    if missing:
        raise SystemExit(f"no wheel of {' and '.join(sorted(missing))} in {folder}; run `make wheels`.")
    with tempfile.TemporaryDirectory(prefix="earnest-wheel-") as place:
        environment = Path(place) / "env"
        venv.create(environment, with_pip=True)
        (Path(place) / "train.py").write_text(LOOP)
        for packages, commands in (
            ([wheels["earnest_audit"]], AUDIT),
            (["pytest"], PLUGIN),
            ([wheels["earnest"]], COMMANDS),
        ):
            _install(environment, packages)
            for command, *words in commands:
                _run(str(_scripts(environment) / command), *words, cwd=place)
    print(f"tried: {', '.join(Path(wheel).name for wheel in wheels.values())}")


def _scripts(environment: Path) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin")


def _install(environment: Path, packages: list[str]) -> None:
    flags = os.environ.get("PIP_FLAGS", "").split()
    python = str(_scripts(environment) / "python")
    _run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *flags, *packages)


def _run(*words: str, cwd: str | None = None) -> None:
    print("$", *words, flush=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, cwd=cwd, env=clean, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

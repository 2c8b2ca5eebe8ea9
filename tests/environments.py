"""The Pythons of the second environments, for tests that start a script in one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_of(name: str) -> str:
    """The interpreter of ``.venv-NAME``. If it is missing, the test fails; it is never skipped."""
    found = ROOT / f".venv-{name}" / "bin" / "python"
    assert found.exists(), f"{found} is missing; `make test-integrations` makes it from envs/{name}.txt"
    return str(found)

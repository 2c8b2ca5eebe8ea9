"""The test session itself: a skip fails CI, a warning from our frames fails, a moved default dtype is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs.pages import ROOT

INNER = """
import pytest, torch, warnings

def test_passes():
    pass

@pytest.mark.skip(reason="no GPU here")
def test_skipped():
    pass

@pytest.mark.xfail(reason="known", strict=False)
def test_xfailed():
    raise ValueError

def test_moves_the_dtype():
    torch.set_default_dtype(torch.float64)

def test_after_it():
    assert torch.get_default_dtype() is torch.float32

def _warn(module):
    exec(compile("import warnings; warnings.warn('careful')", "x.py", "exec"), {"__name__": module})

def test_our_warning():
    _warn("earnest.engines.local")

def test_their_warning():
    _warn("earnestly.other")
"""


@pytest.fixture
def session(tmp_path: Path):
    """Runs tests of INNER under this repository's conftest.py and settings."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("__init__.py", "conftest.py", "shapes.py"):
        (folder / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    (folder / "test_inner.py").write_text(INNER)

    def run(*names: str, workers: int = 0, **environment: str) -> tuple[int, str]:
        clean = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith("PYTEST_")}
        words = [f"tests/test_inner.py::{name}" for name in names] or ["tests/test_inner.py"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", str(workers), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env=clean | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment,  # importing the others takes seconds
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_what_did_not_run_fails_in_ci(session) -> None:
    code, out = session("test_passes", "test_skipped", "test_xfailed", workers=1, CI="true")
    assert code == 1 and "1 passed, 1 skipped, 1 xfailed" in out, out
    assert "did not run, which is a failure in CI" in out
    assert "test_skipped: " in out and "no GPU here" in out and "test_xfailed: " in out


def test_elsewhere_it_is_only_said_but_warnings_and_moved_globals_fail(session) -> None:
    code, out = session()
    assert code == 1
    assert "1 skipped" in out and "did not run, which" not in out
    assert "left torch's default dtype at torch.float64" in out
    assert "FAILED tests/test_inner.py::test_our_warning" in out
    # test_passes, test_moves_the_dtype (its teardown is the error), test_after_it, test_their_warning
    assert "4 passed" in out and "1 failed" in out and "1 error" in out

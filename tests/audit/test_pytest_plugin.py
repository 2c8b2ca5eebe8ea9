"""The pytest plugin, in processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = '''
import sys

import pytest


def loop(rate, updates=8):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(updates):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()  # here
        optimizer.zero_grad()


def test_first():
    """Nothing of torch is imported by the plugin."""
    assert ("torch" in sys.modules) == AUDIT


@pytest.mark.parametrize("rate", [1e-2, 1e-30])
def test_loop(rate):
    loop(rate)


def test_short():
    loop(1e-30, updates=1)


@pytest.mark.audit
@pytest.mark.parametrize("rate", [1e-2, 1e-30])
def test_marked(rate):
    loop(rate)


@pytest.mark.audit
def test_fails_by_itself():
    loop(1e-30)
    assert 1 == 2


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_fixture(audit_step, factor):
    import torch
    from earnest_audit import Step

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)

    def loss(model, batch):
        return factor * (model(batch["x"]) - batch["y"]).square().mean()

    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 1)}
    verdict = audit_step(Step(model=model, loss=loss, batch=batch), quick=True)
    assert verdict.holds
'''


def outcomes(folder: Path, *words: str) -> tuple[dict[str, str], str, int]:
    (folder / "test_it.py").write_text(TESTS.replace("AUDIT", str("--audit" in words)))
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    options = ["-rA", "-W", "error::UserWarning", "--strict-markers", "-p", "earnest_audit.frontends.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words, "test_it.py"], cwd=folder,
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it.py::(\S+)", done.stdout, re.MULTILINE)
    return {name: outcome for outcome, name in found}, done.stdout, done.returncode


MARKED = {
    "test_marked[0.01]": "PASSED",
    "test_marked[1e-30]": "FAILED",
    "test_fails_by_itself": "FAILED",
    "test_fixture[1.0]": "PASSED",
    "test_fixture[0.0]": "FAILED",
}
OTHERS = {"test_first": "PASSED", "test_loop[0.01]": "PASSED", "test_loop[1e-30]": "PASSED", "test_short": "PASSED"}


def test_the_fixture_and_the_mark_fail_a_test_and_other_tests_import_nothing(tmp_path: Path) -> None:
    found, text, code = outcomes(tmp_path)
    assert code == 1 and found == MARKED | OTHERS, text
    line = TESTS.splitlines().index("        optimizer.step()  # here") + 1
    assert f"test_it.py:{line}: GL on the parameters' bits: 2 parameters with a gradient never moved" in text
    assert "The step trains nothing" in text and "assert 1 == 2" in text and "tests train something" not in text


@pytest.mark.parametrize("workers", [(), pytest.param(("-p", "xdist", "-n", "1"), marks=pytest.mark.slow)], ids=len)
def test_with_audit_every_test_is_watched_and_the_run_fails(workers: tuple[str, ...], tmp_path: Path) -> None:
    """The tests pass, and the exit code and the report at the end show the loop that trains nothing."""
    found, text, code = outcomes(tmp_path, "--audit", "-k", "first or loop or short", *workers)
    assert code == 1 and found == OTHERS, text
    report = text.split("= audit =")[1].split("short test summary info")[0]
    assert "test_it.py::test_loop[1e-30]" in report and "test_it.py::test_loop[0.01]" not in report
    assert "3 of 4 tests train something: 1 break a law, 2 hold, 0 could not be judged." in report

"""Make silence impossible in the test process.

Warnings from our own frames are errors (pyproject.toml), the network is off, one thread, and in CI a test that did not
run (skipped, or expected to fail) fails the session: what cannot run there is not called tested.
"""

from __future__ import annotations

import os

# Before torch is imported, and inherited by every subprocess a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401 (the hook finds it by its name)

torch.set_num_threads(1)
install_import_hook(["earnest", "earnest_audit"], "tests.shapes.check")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=25)
settings.register_profile(
    "nightly", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("EARNEST_HYPOTHESIS") or ("ci" if os.environ.get("CI") else "default"))

# nodeid → why it did not run
_not_run: dict[str, str] = {}


def _remember(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = getattr(report, "wasxfail", None) or report.longreprtext.strip().splitlines()[-1:]
        _not_run[report.nodeid] = reason if isinstance(reason, str) else "".join(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _remember(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _remember(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _not_run and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _not_run:
        terminalreporter.section("did not run, which is a failure in CI", red=True)
        for nodeid, reason in sorted(_not_run.items()):
            terminalreporter.line(f"{nodeid}: {reason}")


@pytest.fixture(autouse=True)
def _one_thread_and_default_dtype():
    """A test that moves a global of torch breaks the next one; so put both back, and say who moved the dtype."""
    yield
    moved = torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    assert moved is torch.float32, f"the test left torch's default dtype at {moved}"

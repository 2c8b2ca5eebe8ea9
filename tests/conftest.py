"""Make silence impossible in the test process.

Warnings from our own frames are errors (pyproject.toml), the network is off, one thread, and in CI a test that did not
run (skipped, or expected to fail) fails the session: what cannot run there is not called tested.
"""

from __future__ import annotations

import os
from pathlib import Path

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

INTEGRATIONS = (
    "adapters/test_peft.py",
    "audit/frontends/test_loops.py",
    "audit/trainers",
    "audit/watch/test_training.py",
    "data/test_malformed.py",
    "data/test_reading.py",
    "data/test_rendering.py",
    "diloco",
    "executors",
    "experiments",
    "guards/test_trl.py",
    "meta/test_notebooks.py",
    "meta/test_site.py",
    "models/test_smollm2.py",
    "objectives/test_against_trl.py",
    "objectives/test_more_references.py",
    "replay/test_replay.py",
    "replay/test_served.py",
    "report/test_browser.py",
    "rollouts/test_real_templates.py",
    "runs/test_export.py",
    "serve/test_dashboard.py",
    "serve/test_fuzz.py",
    "serve/test_openai.py",
    "serve/test_tools.py",
    "sync/test_bucket.py",
    "tasks/test_openenv.py",
    "tasks/test_reasoning_gym.py",
    "tasks/test_verifiers.py",
    "tinker",
    "vocabulary/test_independent.py",
)
"""Folders and files of tests that need more than `earnest[test]`: all their tests have the mark `integration`. In other
files single tests have it. tests/meta/test_integrations.py checks both."""


def is_integration(path: Path) -> bool:
    """Whether all tests of this file or folder are marked `integration`."""
    here = Path(__file__).parent
    place = path.relative_to(here).as_posix() if path.is_relative_to(here) else ""
    return any(place == name or place.startswith(f"{name}/") for name in INTEGRATIONS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which the marks that were asked for select nothing. An integration cannot be imported where its
    package is not installed."""
    selected = str(config.option.markexpr)
    if "not integration" in selected:
        return is_integration(collection_path) or None
    if "integration" in selected and collection_path.name.startswith("test_") and not is_integration(collection_path):
        return "mark.integration" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_integration(item.path):
            item.add_marker(pytest.mark.integration)


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

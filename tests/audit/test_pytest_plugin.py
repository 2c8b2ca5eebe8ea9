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


def outcomes(folder: Path, *words: str, tests: str = TESTS, errors: bool = True) -> tuple[dict[str, str], str, int]:
    (folder / "test_it.py").write_text(tests.replace("AUDIT", str("--audit" in words)))
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    options = ["-rA", "--strict-markers", "-p", "earnest_audit.frontends.pytest_plugin"]
    options += ["-W", "error::UserWarning"] if errors else []
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


WARNING = '''
import pytest
import torch
from torch import nn
from earnest_audit import Step, audit


def step():
    """The prompt is read from another tensor: what stands before the supervised tokens does not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16))
    ids = torch.randint(0, 16, (4, 9))
    labels = ids.clone()
    labels[:, :5] = -100

    def loss(model, batch):
        logits = model(torch.cat([batch["prompt"], batch["ids"][:, 5:-1]], 1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    return Step(model, loss, {"ids": ids, "labels": labels, "prompt": ids[:, :5]}, {"ids": "ids", "labels": "labels"})


@pytest.mark.parametrize("strict", [False, True])
def test_fixture(audit_step, strict):
    audit_step(step(), strict=strict)


@pytest.mark.audit
def test_marked():
    audit(step())


@pytest.mark.audit(strict=True)
def test_marked_strictly():
    audit(step())


def test_plain():
    audit(step())
'''


def test_a_warning_is_shown_and_fails_a_test_in_strict_mode_only(tmp_path: Path) -> None:
    found, text, code = outcomes(tmp_path, tests=WARNING, errors=False)
    failed = {name for name, outcome in found.items() if outcome == "FAILED"}
    assert code == 1 and failed == {"test_fixture[True]", "test_marked_strictly"}, text
    assert text.count("PytestWarning: the audit warns: ") == 2 and "A failure in strict mode" in text


@pytest.mark.parametrize(("word", "code"), [("--audit", 0), ("--audit-strict", 1)])
def test_the_report_of_a_run_lists_warnings(tmp_path: Path, word: str, code: int) -> None:
    _, text, found = outcomes(tmp_path, word, "-k", "plain", tests=WARNING, errors=False)
    report = text.split("= audit =")[1]
    assert found == code, text
    assert ("warning: " in report) == (code == 0) and "IG on context in ids (ids)" in report
    assert ("1 hold (1 with warnings)" if code == 0 else "1 break a law, 0 hold,") in report


IDLE = """
import pytest

@pytest.mark.audit
def test_nothing():
    pass

@pytest.mark.audit
def test_one_tensor():
    import torch
    p = torch.ones(2, requires_grad=True)
    torch.optim.SGD([p], lr=0.1).step()

def test_fixture(audit_step):
    from earnest_audit import Verdict
    import earnest_audit
    earnest_audit.audit = lambda *_: Verdict(())
    audit_step(None)
"""


def test_a_marked_test_that_trains_nothing_is_told_so(tmp_path: Path) -> None:
    found, text, code = outcomes(tmp_path, tests=IDLE, errors=False)
    assert code == 1 and set(found.values()) == {"FAILED"}, text
    assert text.count("this test made no Trainer, stepped no optimizer of a module and called no audit(") >= 2
    assert "broken law" not in text and text.count("declare more of the step") == 0
    assert "the audit checked nothing. Declare more of the step." in text


MISTYPED = """
import pytest

@pytest.mark.parametrize("n", [pytest.param(i, marks=m) for i, m in enumerate(
    [pytest.mark.audit(stric=True), pytest.mark.audit(True), pytest.mark.audit(quick=True, strict=True)])])
def test_marked(n):
    import torch
    p = torch.nn.Linear(1, 1)
    o = torch.optim.SGD(p.parameters(), lr=0.1)
    for _ in range(5):
        o.zero_grad()
        p(torch.randn(2, 1)).mean().backward()
        o.step()
"""


def test_unknown_arguments_of_the_mark_are_an_error(tmp_path: Path) -> None:
    found, text, code = outcomes(tmp_path, tests=MISTYPED, errors=False)
    assert code == 1 and list(found.values()).count("FAILED") == 2 and found["test_marked[2]"] == "PASSED", text
    assert "@pytest.mark.audit takes quick=… and strict=…, and got stric=" in text and "and got True" in text

"""The pytest plugin of earnest-audit.

    def test_my_step(audit_step):                 # the laws on one step; the test fails with the findings
        audit_step(model, loss, batch)            # or audit_step(Step(…), quick=True)

    @pytest.mark.audit                            # every trainer and optimizer loop of this test is watched,
    def test_training(): ...                      # and the test fails if a law is broken

    pytest --audit                                # all tests are watched, with a report at the end

A row that warns becomes a warning of the test; ``audit_step(…, strict=True)``, ``@pytest.mark.audit(strict=True)`` and
``pytest --audit-strict`` make a failure of it. If none of these is used, nothing is imported and nothing is watched. If
``--audit`` finds a broken law, an exit code of 0 becomes 1; the tests keep their own outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # torch is imported only where something is audited
    from earnest_audit.frontends.script import Collected
    from earnest_audit.verdict import Finding, Verdict

FOUND = pytest.StashKey[dict[str, dict[str, Any]]]()
"""test -> its rows, whether its verdict holds, its broken laws and its warnings; only with ``--audit``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("audit", "audit of training loops")
    group.addoption(
        "--audit", action="store_true", dest="earnest_audit",
        help="watch every Trainer and optimizer loop that the tests create, and report broken laws at the end",
    )  # fmt: skip
    group.addoption("--audit-strict", action="store_true", help="--audit, and warnings of the audit are broken laws")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "audit(quick=False, strict=False): watch every Trainer and optimizer loop of this test, and fail it where a "
        "law is broken (strict: also where one warns)",
    )
    if config.getoption("earnest_audit") or config.getoption("audit_strict"):
        config.stash[FOUND] = {}


@pytest.fixture
def audit_step() -> Callable[..., Verdict]:
    """``audit_step(step)`` or ``audit_step(model, loss, batch)``: returns the verdict; the test fails if a law
    is broken, with ``strict=True`` also if one warns. Further arguments are those of ``earnest_audit.audit``."""

    def audited(*subject: Any, strict: bool = False, **options: Any) -> Verdict:
        from earnest_audit import audit

        verdict = audit(*subject, **options)
        _judge(verdict, strict, "Declare more of the step.")
        return verdict

    return audited


def _judge(verdict: Verdict, strict: bool, hint: str) -> None:
    """Fail the test where a law is broken or nothing was checked; else its warnings are shown in pytest's summary."""
    import warnings

    verdict = verdict.strict() if strict else verdict
    for f in verdict.warnings:
        warnings.warn(pytest.PytestWarning(f"the audit warns: {_line(f)}"), stacklevel=3)
    if verdict.failures:
        pytest.fail("the audit found a broken law:\n" + "\n".join(map(_line, verdict.failures)), pytrace=False)
    if not verdict.holds:
        rows = "".join(f"\n{f.subject}: {f.measured} ({f.outcome})" for f in verdict.findings)
        pytest.fail(f"the audit checked nothing. {hint}{rows}", pytrace=False)


def _line(finding: Finding) -> str:
    return f"{finding.place}: {finding}" if finding.place else str(finding)


@contextmanager
def _watching(quick: bool) -> Iterator[Collected]:
    """Watch all training inside the block; the verdict is read after the block has ended."""
    import warnings

    from earnest_audit.frontends.script import trained
    from earnest_audit.watching.watcher import WatchWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)  # the findings are reported at the end
        with trained(quick) as found:
            yield found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With ``--audit``: watch the whole test, including its fixtures."""
    found = item.config.stash.get(FOUND, None)
    if found is None:
        return (yield)
    with _watching(quick=False) as watched:
        result = yield
    judged = watched.verdict().strict() if item.config.getoption("audit_strict") else watched.verdict()
    broken, warned = (list(dict.fromkeys(map(_line, rows))) for rows in (judged.failures, judged.warnings))
    found[item.nodeid] = {"rows": len(judged.findings), "holds": judged.holds, "broken": broken, "warned": warned}
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """With the mark: watch the test itself. If the test fails by itself, that failure is reported."""
    mark = item.get_closest_marker("audit")
    if mark is None:
        return (yield)
    options = {"quick": False, "strict": False, **mark.kwargs}
    if mark.args or len(options) > 2:
        given = ", ".join([*map(repr, mark.args), *(f"{name}=" for name in mark.kwargs)])
        pytest.fail(f"@pytest.mark.audit takes quick=… and strict=…, and got {given}", pytrace=False)
    with _watching(options["quick"]) as watched:
        result = yield
    verdict = watched.verdict()
    few = "What trains in this test was watched, and nothing could be judged."
    none = "@pytest.mark.audit: this test made no Trainer, stepped no optimizer of a module and called no audit(…)."
    _judge(verdict, options["strict"], few if verdict.findings else none)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash.get(FOUND, {})
    worker = getattr(session.config, "workeroutput", None)  # of pytest-xdist: what the main process receives
    if worker is not None:
        worker["earnest_audit"] = found
    elif session.exitstatus == pytest.ExitCode.OK and any(judged["broken"] for judged in found.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    found = node.config.stash.get(FOUND, None)
    if found is not None:
        found.update(getattr(node, "workeroutput", {}).get("earnest_audit", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(FOUND, None)
    if found is None:
        return
    terminalreporter.section("audit")
    judged = [test for test in found.values() if test["rows"]]
    for name, test in found.items():
        if test["broken"] or test["warned"]:
            terminalreporter.write_line(name, red=bool(test["broken"]), yellow=not test["broken"])
        for line in (*test["broken"], *(f"warning: {line}" for line in test["warned"])):
            terminalreporter.write_line(f"  {line}")
    broken, held, warned = (sum(bool(test[what]) for test in judged) for what in ("broken", "holds", "warned"))
    terminalreporter.write_line(
        f"{len(judged)} of {len(found)} tests train something: {broken} break a law, {held} hold"
        + (f" ({warned} with warnings)" if warned else "")
        + f", {len(judged) - broken - held} could not be judged. "
        "Plain loops are watched only: their losses are not audited."
    )

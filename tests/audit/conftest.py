"""A row "could not be checked (Exception)" is a fault of ours, unless the test is about such rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from earnest_audit import executor
from earnest_audit.verdict import Verdict


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "may_not_be_checked: the audited step refuses changes on purpose")


@pytest.fixture(autouse=True)
def _everything_could_be_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Audits turn what a changed step raises into a row; here that would hide our own bugs."""
    heard: list[Verdict] = []
    listen = heard.append
    executor.LISTENERS.append(listen)
    try:
        yield
    finally:
        executor.LISTENERS.remove(listen)
    if request.node.get_closest_marker("may_not_be_checked") is None:
        rows = [f"{f.law} {f.subject}: {f.measured}" for verdict in heard for f in verdict.errors]
        assert not rows, "\n".join(rows)

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.diloco import crossing
from tests.diloco.processes import context
from tests.diloco.servers import Seaweed
from tests.runs.tiny import tiny_folder


def pytest_configure(config: pytest.Config) -> None:
    crossing.register(config)
    crossing.watch()


@pytest.fixture(autouse=True)
def crosses(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is marked ``processes`` starts a process, or uses a server in one."""
    before = crossing.STARTED[0]
    yield
    if request.node.get_closest_marker("processes") and not crossing.SERVERS & set(request.fixturenames):
        assert crossing.STARTED[0] > before, "marked processes, and none was started"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def ctx() -> Any:
    """Starts processes from a server that has imported what a replica imports."""
    return context()


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    server = Seaweed(tmp_path_factory.mktemp("seaweed")).start()
    yield server
    server.stop()

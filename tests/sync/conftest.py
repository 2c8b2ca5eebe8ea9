from __future__ import annotations

import pytest

from tests.diloco.crossing import register


def pytest_configure(config: pytest.Config) -> None:
    register(config)

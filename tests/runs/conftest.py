from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from earnest.config import RunConfig, load_file
from tests.runs.tiny import recipe, tiny_folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make_config(tiny: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A config on the tiny model with these overrides, written as on the command line."""

    def make(*overrides: str) -> RunConfig:
        return load_file(recipe(tmp_path / "recipe.yaml", tiny), overrides)

    return make


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)

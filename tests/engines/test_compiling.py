"""``engine.compile``: the compiled layers give the eager gradient, and a failure is named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from earnest.config import from_mapping, recipes
from earnest.errors import ConfigError


def worker(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engines.compile_worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return worker()


@pytest.mark.slow  # compiling takes longer than everything else here
@pytest.mark.parametrize("case", ["compiled", "checkpointed"])
def test_compiled_layers_give_the_eager_gradient(case: str, found: dict[str, Any]) -> None:
    one = found[case]
    assert one["graphs"] > 0 and one["layout"].endswith(", compiled"), one
    assert one["apart"] < 1e-5
    assert one["sampled"] == 2


@pytest.mark.slow
def test_a_failure_is_named_and_the_step_goes_on(found: dict[str, Any]) -> None:
    one = found["broken"]
    assert "not compiled (" in one["layout"] and "no C++ compiler here" in one["layout"], one
    assert one["apart"] == 0.0 and one["sampled"] == 2


@pytest.mark.slow
def test_inductor_gives_the_eager_gradient() -> None:
    one = worker("inductor")["inductor"]
    assert one["layout"].endswith(", compiled") and one["apart"] < 1e-4, one


def test_compiling_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="not tested with shards"):
        from_mapping(recipes.read("quickstart")[1], ["engine.compile=true", "engine.shard=2"])

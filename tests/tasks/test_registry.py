"""Tasks by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from earnest.errors import EarnestError, MissingExtra
from earnest.tasks import Task, UnknownTask, get_task, list_tasks


def test_every_built_in_task_is_found_by_its_listed_name() -> None:
    infos = [info for info in list_tasks() if info.source == "built-in"]
    assert {"sort", "add", "count", "style/warmth", "holes", "holes/marker"} <= {info.name for info in infos}
    for info in infos:
        task = get_task(info.name)
        assert isinstance(task, Task)
        assert (task.name, task.description) == (info.name, info.description)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("sorted", "did you mean 'sort'"),
        ("holes/markers", "did you mean 'holes/marker'"),
        ("zzzzzz", "known: add, calculator, count"),
        pytest.param("reasoning_gym/chain_sums", "did you mean 'chain_sum'", marks=pytest.mark.integration),
        ("reasoning_gym/", "reasoning_gym/<dataset>"),
        pytest.param("verifiers/no-such-package", "install its package first", marks=pytest.mark.integration),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name: str, way_out: str) -> None:
    with pytest.raises(UnknownTask, match=way_out):
        get_task(name)


def test_without_the_extras_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("earnest.tasks.external_reasoning_gym.installed", lambda: False)
    monkeypatch.setattr("earnest.tasks.external_verifiers.installed", lambda: False)
    monkeypatch.setattr("earnest.tasks.external_openenv.installed", lambda: False)
    with pytest.raises(MissingExtra, match=r'pip install "earnest\[reasoning-gym\]"'):
        get_task("reasoning_gym/chain_sum")
    with pytest.raises(EarnestError, match=r'pip install "earnest\[verifiers\]"'):
        get_task("verifiers/anything")
    with pytest.raises(EarnestError, match=r'pip install "earnest\[openenv\]"'):
        get_task("openenv/http://localhost:1")
    lines = {info.name: info for info in list_tasks() if not info.available}
    assert set(lines) == {"reasoning_gym/<dataset>", "verifiers/<environment>", "openenv/<address>"}


def test_tasks_import_neither_torch_nor_the_extras() -> None:
    code = (
        "import sys; from earnest.tasks import get_task; get_task('holes').prompts('train', 1, 0);"
        "print([m for m in ('torch', 'transformers', 'reasoning_gym', 'verifiers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"

"""README, docs and model cards do what they say: each page is run in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs.check import check
from scripts.docs.pages import ROOT, all_pages

PAGES = all_pages()
NIGHTLY = {
    *("docs/guards.md", "docs/diloco.md", "docs/steering.md", "docs/scale.md", "docs/tutorials/eight-gpus.md"),
    "docs/tutorials/first-run.md",
    *("docs/objectives/preferences.md", "docs/objectives/distillation.md", "docs/findings/label-smoothing.md"),
}
"""Pages that train for long. `make test-integrations` checks their words and `make nightly` runs them."""


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/writing-docs.md"} | NIGHTLY <= {_name(p) for p in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_page_is_sound(page: Path) -> None:
    bad = check(page)
    assert not bad, "\n".join(bad)


@pytest.mark.integration  # together the pages show every optional package
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if _name(p) in NIGHTLY else (), id=_name(p)) for p in PAGES]
)
def test_page_runs(page: Path) -> None:
    # python -m scripts.docs.run docs/writing-docs.md
    done = subprocess.run(
        [sys.executable, "-m", "scripts.docs.run", _name(page)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout

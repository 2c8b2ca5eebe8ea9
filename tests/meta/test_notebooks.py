"""The notebooks are the tutorials, and run from top to bottom in a kernel of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from scripts.docs.notebooks import FOLDER, TUTORIALS, notebook, place, written


def test_the_files_are_up_to_date() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(TUTORIALS)
    for name in TUTORIALS:
        assert place(name).read_text() == written(name), "run `python -m scripts.docs.notebooks`"
        nbformat.validate(nbformat.read(place(name), as_version=4))


# test_docs_run.py runs the same blocks as pages, whose commands start in a tenth of the time. One notebook shows that a
# kernel runs what was written.
@pytest.mark.parametrize("name", [n if n == "own-term" else pytest.param(n, marks=pytest.mark.slow) for n in TUTORIALS])
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "work").mkdir()
    made = nbformat.reads(json.dumps(notebook(name, small=True)), as_version=4)
    client = nbclient.NotebookClient(made, timeout=600, resources={"metadata": {"path": str(tmp_path / "work")}})
    client.execute()
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code) and len(code) > 3

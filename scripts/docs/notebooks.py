"""The notebooks, made from the tutorials: ``python -m scripts.docs.notebooks`` writes notebooks/*.ipynb.

The text becomes cells of Markdown, a block of Python or of commands a cell of code, and a file a cell with
``%%writefile``. tests/meta/test_notebooks.py checks that the files are up to date and executes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.docs.pages import ROOT, Block, commands, read
from scripts.docs.run import reduced

TUTORIALS = ("supervised", "preferences", "reward", "distillation", "own-term", "agent-trace")
FOLDER = ROOT / "notebooks"
INSTALL = (
    "# In a new runtime, install earnest first (from a clone; from PyPI: earnest).\n# %pip install ./earnest-audit ."
)


def notebook(tutorial: str, small: bool = False) -> dict[str, Any]:
    """A tutorial as a notebook; ``small``: with the words that make its commands quick, for the tests."""
    path = ROOT / "docs/tutorials" / f"{tutorial}.md"
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = [_cell("code", INSTALL, 0)]
    start = 0
    for block in read(path).blocks:
        opening = block.line - 2  # of the fence, from 0
        end = next(i for i in range(block.line - 1, len(lines)) if lines[i].startswith("```"))
        _text(cells, lines[start:opening])
        cells.append(_cell("code", _code(block, small), len(cells)))
        start = end + 1
    _text(cells, lines[start:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _text(cells: list[dict[str, Any]], lines: list[str]) -> None:
    text = "\n".join(line for line in lines if not line.startswith("<!-- test:")).strip()
    if text:
        cells.append(_cell("markdown", text, len(cells)))


def _code(block: Block, small: bool) -> str:
    name = block.one("file")
    if name is not None:
        return f"%%writefile {name}\n{block.text.rstrip()}"
    if block.language == "python":
        return block.text.rstrip()
    found = (reduced(block, command) if small else command for command in commands(block))
    return "%%bash\nset -e\n" + "\n".join(command.text for command in found)


def _cell(kind: str, text: str, number: int) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def written(tutorial: str) -> str:
    return json.dumps(notebook(tutorial), indent=1, ensure_ascii=False) + "\n"


def place(tutorial: str) -> Path:
    return FOLDER / f"{tutorial}.ipynb"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in TUTORIALS:
        place(name).write_text(written(name), encoding="utf-8")
        print(place(name).relative_to(ROOT))

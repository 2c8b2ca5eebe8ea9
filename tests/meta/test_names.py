"""A public class name means one thing in src, and a module is named for what it holds."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from scripts.docs.pages import ROOT

SOURCE = ROOT / "src" / "earnest"


def shared_names(source: Path) -> dict[str, list[str]]:
    """Public classes that are defined in more than one module: name → the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(source).as_posix())
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_public_class_name_is_used_twice() -> None:
    assert shared_names(SOURCE) == {}


def test_a_name_that_is_used_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Batch: ...\nclass _Own: ...\n")
    (tmp_path / "b.py").write_text("class Batch: ...\nclass _Own: ...\nclass Other: ...\n")
    assert shared_names(tmp_path) == {"Batch": ["a.py", "b.py"]}


def test_no_package_has_a_module_that_is_called_run() -> None:
    """Each command has its own name; ``earnest run`` itself is in cli.py."""
    assert [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("run.py")] == []

"""The numbers of tests and schedules in docs/diloco.md are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def marked(folder: Path) -> list[str]:
    """Test functions that carry the marker, by themselves or by their file."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        whole = any(isinstance(n, ast.Assign) and "mark.processes" in ast.unparse(n) for n in tree.body)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                own = any("mark.processes" in ast.unparse(d) for d in node.decorator_list)
                found += [f"{path.name}: {node.name}"] if own or whole else []
    return found


def test_the_page_has_the_number_of_tests_that_cross_a_process() -> None:
    """conftest.py checks that a marked test starts a process, or uses a server in one."""
    numbers = [len(marked(ROOT / "tests" / folder)) for folder in ("diloco", "executors")]
    text = " ".join((ROOT / "docs" / "diloco.md").read_text().split())
    said = re.search(r"(\d+) tests in tests/diloco and (\d+) in tests/executors cross a process", text)
    assert said is not None and [int(n) for n in said.groups()] == numbers


def test_the_page_has_the_number_of_schedules() -> None:
    source = (ROOT / "tests" / "diloco" / "test_schedules.py").read_text()
    short, long = re.findall(r'"count", \[(\d+), pytest\.param\((\d+)', source)[0]
    assert f"{short} random schedules in CI, {long} nightly" in (ROOT / "docs" / "diloco.md").read_text()

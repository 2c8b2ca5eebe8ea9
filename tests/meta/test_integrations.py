"""A test that imports a package outside `earnest[test]` is marked `integration`: `make test` needs the core only."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.docs.pages import ROOT
from tests.conftest import INTEGRATIONS, is_integration

OURS = {"earnest", "earnest_audit", "benchmarks", "experiments", "scripts", "tests", "__future__"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def core_distributions() -> set[str]:
    """The distributions that `pip install .[test]` names, and what comes with one of them."""
    extras = PROJECT["optional-dependencies"]
    todo = [Requirement(line) for line in [*PROJECT["dependencies"], *extras["test"]]]
    found = {"pydantic-core", "jinja2", "starlette"}
    while todo:
        need = todo.pop()
        if need.name == "earnest":
            todo += [Requirement(line) for extra in need.extras for line in extras[extra]]
        else:
            found.add(canonicalize_name(need.name))
    return found


def core_modules() -> set[str]:
    core = core_distributions()
    by_module = metadata.packages_distributions()
    return {m for m, names in by_module.items() if core & {canonicalize_name(name) for name in names}}


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that this code imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            yield str(ast.literal_eval(node.args[0])).split(".")[0]


def unmarked(source: str, core: set[str]) -> dict[str, set[str]]:
    """The parts of a test file, by name, that import an optional package without the mark, with the packages.

    A helper may import one if some test of the file has the mark. ``borrowing`` finds tests of other files that use it.
    """
    known = core | OURS | sys.stdlib_module_names
    found: dict[str, set[str]] = {}
    for part in ast.parse(source).body:
        optional = set(imported(part)) - known
        is_test = isinstance(part, ast.FunctionDef) and part.name.startswith("test_")
        decorators = " ".join(ast.unparse(d) for d in part.decorator_list) if isinstance(part, ast.FunctionDef) else ""
        marked = "mark.integration" in decorators if is_test else "mark.integration" in source and hasattr(part, "body")
        if optional and not marked:
            found[getattr(part, "name", f"line {part.lineno}")] = optional
    return found


def helpers(source: str, core: set[str]) -> set[str]:
    """The functions of a test file, other than tests, that import an optional package."""
    known = core | OURS | sys.stdlib_module_names
    parts = [part for part in ast.parse(source).body if isinstance(part, ast.FunctionDef)]
    return {part.name for part in parts if not part.name.startswith("test_") and set(imported(part)) - known}


def borrowing(source: str, lent: dict[str, set[str]]) -> set[str]:
    """The names that this file imports from ``lent`` (module → helpers) and uses in a part without the mark."""
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    taken = {a.asname or a.name for node in imports for a in node.names if a.name in lent.get(str(node.module), ())}
    plain = [part for part in tree.body if part not in imports and "mark.integration" not in ast.unparse(part)]
    return taken & {node.id for part in plain for node in ast.walk(part) if isinstance(node, ast.Name)}


def test_an_optional_import_without_the_mark_is_found() -> None:
    core = {"pytest"}
    assert unmarked("import trl\n", core) == {"line 1": {"trl"}}
    assert unmarked("def test_a():\n    from peft import LoraModel\n", core) == {"test_a": {"peft"}}
    assert unmarked("def helper():\n    import ray\n", core) == {"helper": {"ray"}}
    marked = "@pytest.mark.integration\ndef test_a():\n    import ray\n"
    assert not unmarked("import pytest\n" + marked, core)
    assert unmarked("import ray\n" + marked, core) == {"line 1": {"ray"}}, (
        "the mark of one test does not cover the file"
    )
    assert helpers("def make():\n    import ray\n", core) == {"make"}
    take = "from tests.a import make\n"
    assert borrowing(take + "def test_b():\n    make()\n", {"tests.a": {"make"}}) == {"make"}
    assert not borrowing(take + "@pytest.mark.integration\ndef test_b():\n    make()\n", {"tests.a": {"make"}})


def test_every_test_with_an_optional_import_is_marked() -> None:
    core = core_modules()
    tests = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if not is_integration(p)]
    missing = {str(p.relative_to(ROOT)): found for p in tests if (found := unmarked(p.read_text(), core))}
    assert not missing, (
        "these need @pytest.mark.integration, or a line in INTEGRATIONS of tests/conftest.py, or their package in the "
        f"extra `test`: {missing}"
    )
    lent = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts): helpers(p.read_text(), core)
        for p in sorted((ROOT / "tests").rglob("*.py"))
    }
    borrowed = {str(p.relative_to(ROOT)): found for p in tests if (found := borrowing(p.read_text(), lent))}
    assert not borrowed, f"these use a helper that imports an optional package, in a part without the mark: {borrowed}"


def test_the_core_has_no_heavy_package() -> None:
    heavy = {"ray", "torchmonarch", "modal", "torchft", "trl", "peft", "mkdocs-material", "playwright", "vllm"}
    assert not heavy & core_distributions()


def test_every_entry_of_the_table_exists() -> None:
    assert not [name for name in INTEGRATIONS if not (ROOT / "tests" / name).exists()]
    assert list(INTEGRATIONS) == sorted(set(INTEGRATIONS))

"""The audit imports no other package of earnest, so that it can be installed by itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import earnest.audit
import earnest_audit

FOLDER = Path(earnest_audit.__file__).parent


def test_no_module_of_the_audit_imports_another_package_of_earnest() -> None:
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{path.relative_to(FOLDER)}:{node.lineno}: {name}" for name in names if name.split(".")[0] == "earnest"
            ]
    assert not found, found


def test_the_core_imports_no_front_end() -> None:
    core = [*FOLDER.glob("*.py"), *(FOLDER / "subjects").glob("*.py"), *(FOLDER / "laws").glob("[!_]*.py")]
    front = re.compile(r"^(from|import) earnest_audit\.frontends", re.M)
    found = [path.name for path in core if front.search(path.read_text())]
    assert found == ["__main__.py"]


def test_every_public_name_resolves() -> None:
    names = [
        name for name in earnest_audit.__all__ if name != "AuditCallback"
    ]  # imports transformers; has its own tests
    assert len(names) > 25 and all(getattr(earnest_audit, name) is not None for name in names)


def test_earnest_audit_is_the_same_package_under_its_old_name() -> None:
    assert earnest.audit.Step is earnest_audit.Step and set(earnest.audit.__all__) == set(earnest_audit.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Stap'; earnest_audit has "):
        earnest.audit.Stap  # noqa: B018

"""Packages whose names are imported when they are first used.

The stub beside a package's ``__init__.py`` is its only list of public names. Type checkers read it as usual, and
``lazy`` reads the same lines at run time:

    from earnest.models.loading import load as load        # in __init__.pyi

    __getattr__, __dir__, __all__ = lazy(__name__)         # in __init__.py
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def lazy(package: str, **needs: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of the package, from the imports in its stub. ``needs``: a name is
    listed only where this package is installed."""
    module = sys.modules[package]
    assert module.__file__ is not None, "a package with a stub has a file"
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    where = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    names = sorted(name for name in where if name not in needs or find_spec(needs[name]))

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, attribute = where[name]
        value = getattr(importlib.import_module(home), attribute)
        setattr(module, name, value)
        return value

    return find, lambda: names, names

"""Old public names: they work for one more release and warn at their first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release.", DeprecationWarning, stacklevel)


def old_names(module: dict[str, Any], names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``. module: its ``globals()``. names: old name -> new name in the same module."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        warn_renamed(name, names[name])
        module[name] = module[names[name]]  # the next use is found without __getattr__, so it warns once
        return module[name]

    return find

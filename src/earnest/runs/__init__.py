"""A run from its config to its folder: start it, stop it, resume it bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earnest.runs.folder import RunFolder as RunFolder
    from earnest.runs.run import Finished as Finished
    from earnest.runs.run import check as check
    from earnest.runs.run import resume as resume
    from earnest.runs.run import start as start

_HOME = {"RunFolder": "folder", "Finished": "run", "check": "run", "resume": "run", "start": "run"}

__all__ = ["Finished", "RunFolder", "check", "resume", "start"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'earnest.runs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"earnest.runs.{_HOME[name]}"), name)

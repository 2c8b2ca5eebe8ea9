"""File and line in the user's code, as "train.py:12"; empty if no file of the user is involved."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parent
INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


def place_of(function: Callable[..., Any]) -> str:
    """The place of the definition of a function, a method, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    own = vars(type(function)).get("__call__")  # of a callable object
    code = getattr(function, "__code__", None) or getattr(own, "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def caller() -> str:
    """The innermost line of the user's code that is being executed."""
    frame = inspect.currentframe()
    while frame is not None:
        if place := _place(frame.f_code.co_filename, frame.f_lineno):
            return place
        frame = frame.f_back
    return ""


def parts(place: str) -> tuple[str, int]:
    """File and line of a place."""
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdigit() else (place, 1)


@functools.lru_cache(maxsize=256)
def _file(name: str) -> str:
    """The path, relative where it is in the current folder; empty for installed code, this package, and no file."""
    path = Path(name)
    if not path.is_file():
        return ""
    path = path.resolve()
    console_script = path == Path(sys.argv[0]).resolve() and path.suffix != ".py"
    if console_script or any(path.is_relative_to(folder) for folder in (OURS, *INSTALLED)):
        return ""
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def _place(name: str, line: int) -> str:
    file = _file(name)
    return f"{file}:{line}" if file else ""

"""The user's own code: files and modules that register terms, adapters, tasks and optimizers when imported.

There are three ways to name a module; each imports it once:

    import: [my_terms.py, package.module]           in a recipe
    earnest objectives --import my_terms.py         on the command line; adapters and tasks alike
    [project.entry-points."earnest.plugins"]        in the pyproject.toml of an installed package
    mine = "package.module"

``find`` looks up one object of such code: ``task: my_task.py:Name``, ``grade: my_rewards.py:score``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from earnest.errors import ConfigError, EarnestError, nearest

GROUP = "earnest.plugins"


def load(entry: str) -> str:
    """Import a file (``….py``) or a module, once; returns the entry by which another process finds the same code.

    That is the module's name, or the file's absolute path.
    """
    _module(entry, "import")
    return str(_path(entry)) if entry.endswith(".py") else entry


def find(entry: str, key: str) -> object:
    """The object that ``my_file.py:name`` or ``package.module:name`` stands for; ``key`` begins every error."""
    place, _, name = entry.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{key}: {entry!r} names no object; write my_file.py:name or package.module:name.")
    module = _module(place, key)
    if not hasattr(module, name):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        hint = nearest(name, known) if known else "it defines no function and no class."
        raise ConfigError(f"{key}: {place} has no {name!r}; {hint}")
    return getattr(module, name)


def absolute(entry: str) -> str:
    """``my_file.py:name`` with the file's absolute path, by which another process finds it; others stay as they are."""
    place, _, name = entry.rpartition(":")
    return f"{_path(place)}:{name}" if place.endswith(".py") else entry


def _path(entry: str) -> Path:
    return Path(entry).expanduser().resolve()


def _module(entry: str, key: str) -> ModuleType:
    if not entry.endswith(".py"):
        _attempt(entry, lambda: importlib.import_module(entry), key)
        return sys.modules[entry]
    path = _path(entry)
    if not path.is_file():
        raise ConfigError(
            f"{key}: there is no file {path}; give the path of a .py file, from the recipe's folder or from here, or "
            "the name of a module."
        )
    # One name per path: a second import is the same module, and what it defines can be pickled.
    name = f"earnest_import_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a .py file always has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            _attempt(entry, functools.partial(spec.loader.exec_module, module), key)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@functools.cache  # an exception is not cached: a broken plugin is reported every time
def load_installed() -> None:
    """Import the modules that installed packages list in the entry-point group ``earnest.plugins``."""
    for point in importlib.metadata.entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else "an installed package"
        _attempt(f"{point.value} (the plugin {point.name!r} of {owner})", point.load, "import")


def _attempt(what: str, run: Callable[[], object], key: str) -> None:
    """Turn any error of the user's code into one sentence with the line that raised it."""
    try:
        run()
    except EarnestError as error:
        raise ConfigError(f"{key}: {what}: {error}") from error
    except Exception as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        line = getattr(error, "lineno", None) or (place.tb_lineno if place is not None else None)
        file = getattr(error, "filename", None) or (place.tb_frame.f_code.co_filename if place is not None else what)
        where = "" if "importlib" in str(file) else f" ({Path(str(file)).name}, line {line})"
        raise ConfigError(
            f"{key}: {what} cannot be imported: {type(error).__name__}: {error}{where}; correct it, or remove it."
        ) from error

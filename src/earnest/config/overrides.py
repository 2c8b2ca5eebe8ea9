"""``key=value`` on the command line, and the mistakes in it that are found without importing torch."""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from earnest.config import text
from earnest.errors import ConfigError


def merge(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``data`` with the overrides applied."""
    merged = copy.deepcopy(dict(data))
    for override in overrides:
        _apply(merged, override)
    return merged


def check_spelling(data: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise for an override that cannot be applied, and for a misspelt key of a recipe. The values and the keys inside
    are checked by ``loading``, which imports torch."""
    known = list(top_keys())
    for key in merge(data, overrides):
        close = difflib.get_close_matches(str(key), known, n=1)
        if key not in known and close:
            raise ConfigError(f"{key}: unknown key; did you mean {close[0]!r}?")


def top_keys() -> Iterator[str]:
    """The keys of a recipe, from the source of the classes that declare them, because importing them imports torch."""
    for file, name in (("loop.py", "LoopConfig"), ("schema.py", "RunConfig")):
        tree = ast.parse(Path(__file__).with_name(file).read_text(encoding="utf-8"))
        declared = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        for line in declared.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield {"imports": "import"}.get(line.target.id, line.target.id)


def _apply(data: dict[str, Any], override: str) -> None:
    """``optimizer.lr=1e-4`` or ``objective.0.clip=0.3``; the value is YAML, so lists and mappings work too."""
    key, equals, written = override.partition("=")
    key = key.strip()
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"{override!r} is not an override; write key=value, e.g. optimizer.lr=1e-4 or steps=20.")
    value = text.parse(written, key)
    *path, last = key.split(".")
    place: Any = data
    for depth, part in enumerate(path):
        where = ".".join(path[:depth])
        if isinstance(place, list):
            place = place[_index(place, part, where, override)]
        else:
            if part not in place or place[part] is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, (dict, list)):
            raise ConfigError(f"{override}: {'.'.join(path[: depth + 1])} is {place!r}, which has no keys inside.")
    if isinstance(place, list):
        place[_index(place, last, ".".join(path), override)] = value
    else:
        place[last] = value


def _index(place: list[Any], part: str, where: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(place):
        count = f"the places 0 to {len(place) - 1}" if len(place) > 1 else "the place 0 only" if place else "no entry"
        raise ConfigError(f"{override}: {where} is a list and has {count}, not {part!r}.")
    return int(part)

"""YAML with the floats of YAML 1.2 (``1e-4`` is a number); a repeated key is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from earnest.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise ConfigError(f"the key {key!r} is given twice (line {key_node.start_mark.line + 1}); keep one.")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.Dumper):
    """Puts quotes round a text that ``_Loader`` would take for a number."""


# PyYAML follows YAML 1.1, in which a float needs a dot: 1e-4 would be a text.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def parse(text: str, where: str) -> Any:
    """The value of the YAML in ``text``; ``where`` names the text in errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where} is not YAML{place}: {getattr(error, 'problem', None) or error}.") from None


def parse_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    found = parse(text, str(path))
    if found is None:
        raise ConfigError(f"{path} is empty; a recipe has at least task, adapter, objective and optimizer.")
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not a mapping of keys to values.")
    return found


def spell(data: Mapping[str, Any]) -> str:
    """Data as YAML, in the given order, that ``parse`` reads back as the same data."""
    plain, escaped = (
        yaml.dump(
            dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=readable, default_flow_style=None, width=120
        )
        for readable in (True, False)
    )
    # PyYAML writes some line breaks of Unicode (U+0085) as they are and reads them back as spaces.
    return plain if parse(plain, "a config") == dict(data) else escaped


def map_texts(change: Callable[[str], str], value: Any) -> Any:
    """The value with every text in its lists and mappings changed; keys stay."""
    if isinstance(value, list):
        return [map_texts(change, item) for item in value]
    if isinstance(value, dict):
        return {key: map_texts(change, item) for key, item in value.items()}
    return change(value) if isinstance(value, str) else value


def absolute(path: str) -> str:
    """The absolute path of a file or folder that exists; any other text as it is."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path

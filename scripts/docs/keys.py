"""The keys of a recipe as a table for people: ``python -m scripts.docs.keys`` writes the one in docs/runs.md."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import is_dataclass

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from earnest.config.schema import Kinded, RunConfig
from earnest.settings import field_infos


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of every key, with the keys of nested mappings."""
    for name, field in model.model_fields.items():
        if name in getattr(model, "hidden_fields", ()):
            continue
        inner, listed = _part(field.annotation)
        if inner is not None and not (listed and field.default_factory is list):
            path = f"{prefix}{name}.{'0.' if listed else ''}"
            yield from keys(inner, path)
            if "fields" in inner.model_fields:
                whose = "kind" if issubclass(inner, Kinded) else "task"
                yield f"{path}…", f"the {whose}'s own", f"the fields of that {whose}"
            continue
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if is_dataclass(kind) and isinstance(kind, type):
                infos = field_infos(kind)
                yield from ((f"{prefix}{name}.{info.name}", info.default.lower(), info.doc) for info in infos)
        if is_dataclass(field.annotation):
            continue
        default = (
            "required"
            if field.default is PydanticUndefined and field.default_factory is None
            else field.get_default(call_default_factory=True)
        )
        shown = (
            "none"
            if default is None
            else str(default).lower()
            if isinstance(default, bool)
            else str(default) or "empty"
        )
        yield prefix + (field.alias or name), shown, field.description or ""


def _part(annotation: object) -> tuple[type[BaseModel] | None, bool]:
    listed_inside = typing.get_origin(annotation) is list
    for candidate, listed in [(annotation, False), *((a, listed_inside) for a in typing.get_args(annotation))]:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate, listed
    return None, False


def table() -> str:
    rows = [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in keys()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())

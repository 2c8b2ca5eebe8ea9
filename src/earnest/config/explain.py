"""A pydantic error as one sentence: the key, the value, what is allowed, and the way out."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from earnest.errors import EarnestError, nearest
from earnest.settings import FieldProblem, settings

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "dataclass_exact_type": "a mapping of keys to values",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """A sentence about the first problem, with the number of the others."""
    problems = error.errors()
    # An unknown key is the likeliest cause of the others (a misspelt one is also missing), so it is reported first.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return _one(first, model) + more


def _one(problem: Any, model: type[BaseModel]) -> str:
    location = [str(part) for part in problem["loc"] if not _is_union_tag(part)]
    key, kind, value, context = ".".join(location), problem["type"], problem["input"], problem.get("ctx", {})
    cause = context.get("error")
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {suggest(location, model)}"
    if kind == "missing":
        return f"{key}: is required; give it a value."
    if isinstance(cause, FieldProblem):
        return f"{key}.{cause}" if key else str(cause)
    if isinstance(cause, EarnestError):
        return f"{key}: {cause}" if key else str(cause)
    if kind in _TYPES:
        return f"{key}: must be {_TYPES[kind]}, got {value!r}."
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{key}: must be {words} {context[bound]:g}, got {value!r}."
    if kind == "literal_error":
        allowed = str(context["expected"])
        names = [name.strip(" '") for name in allowed.replace(" or ", ",").split(",")]
        hint = f" ({nearest(value, names)})" if isinstance(value, str) else ""
        return f"{key}: must be {allowed}, got {value!r}{hint}."
    if kind in ("too_short", "string_too_short"):
        return f"{key}: is empty; give at least {context.get('min_length', 1)}."
    if kind == "string_pattern_mismatch":
        return f"{key}: must match {context['pattern']}, got {value!r}."
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{key}: {message}, got {value!r}."


def _is_union_tag(part: object) -> bool:
    """Whether it names a member of a union ("int", "list[str]"), which pydantic adds to the location of a key."""
    return isinstance(part, str) and (part in ("int", "str", "float", "bool", "none") or "[" in part)


def suggest(location: list[str], model: type[Any]) -> str:
    """A suggestion for an unknown key: the same key in another mapping, else the nearest key of this mapping."""
    beside = _fields_at(location[:-1], model)
    if close := difflib.get_close_matches(location[-1], beside, n=1, cutoff=0.6):
        return f"did you mean {'.'.join([*location[:-1], close[0]])!r}?"
    same = [path for path in dotted(model) if path.split(".")[-1] == location[-1]]
    if same:
        return f"did you mean {same[0]!r}?"
    return nearest(location[-1], beside)


def dotted(model: type[Any], prefix: str = "") -> Iterator[str]:
    """Every key of a model and of the models in it; keys inside lists are left out."""
    extra = getattr(model, "known_fields", None)
    for name in [*names(model), *(extra() if extra else ())]:
        yield prefix + name
        inner = _inner(model, name)
        if inner is not None:
            yield from dotted(inner, f"{prefix}{name}.")


def _fields_at(location: list[str], model: type[Any]) -> list[str]:
    for part in location:
        if part.isdigit():
            continue
        inner = _inner(model, part)
        if inner is None:
            return []
        model = inner
    return names(model)


def names(model: type[Any]) -> list[str]:
    """The keys of one mapping, a model or a class of settings, as a recipe writes them."""
    if is_dataclass(model):
        return [name for name, _, _ in settings(model)]
    hidden = getattr(model, "hidden_fields", ())
    return [field.alias or name for name, field in model.model_fields.items() if name not in hidden]


def _inner(model: type[Any], name: str) -> type[Any] | None:
    field = getattr(model, "model_fields", {}).get(name)
    if field is None:
        return None
    candidates = [field.annotation, *typing.get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and (issubclass(c, BaseModel) or is_dataclass(c))), None)

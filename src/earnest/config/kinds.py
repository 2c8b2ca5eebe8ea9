"""Settings that belong to a kind: the fields of a term, an adapter or an optimizer are those of its dataclass.

Nothing is listed twice: the dataclass says which fields there are, of what type and with what default, and its own
checks say which values are legal.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from earnest.config.explain import FieldProblem, sentence

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def construct(cls: type, values: Mapping[str, Any], make: Callable[..., Any] | None = None) -> Any:
    """``cls(**values)``, each value held against its field's annotation: no text for a number, no unknown key."""
    hints = typing.get_type_hints(cls)
    shape = {
        f.name: (hints[f.name], ... if f.default is MISSING and f.default_factory is MISSING else _default(f))
        for f in fields(cls)
        if f.init
    }
    model = create_model(cls.__name__, __config__=STRICT, **shape)  # type: ignore[call-overload]
    given = {key: _tuples(value, hints.get(key)) for key, value in values.items()}
    try:
        model.model_validate(given)
    except ValidationError as error:
        raise FieldProblem(sentence(error, model)) from None
    return (make or cls)(**given)


def plain(value: Any) -> Any:
    """A dataclass instance, a tuple or a plain value as what YAML can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


def _tuples(value: Any, hint: Any) -> Any:
    """YAML has lists only; where the field is a tuple, the list is one."""
    wanted = [hint, *typing.get_args(hint)]
    if isinstance(value, list) and any(typing.get_origin(w) is tuple or w is tuple for w in wanted):
        return tuple(value)
    return value

"""Whether a declaration is of the type of its field, and so is what a declared function returns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

from earnest_audit.errors import SubjectError, nearest


@dataclass
class Called:
    """A declared function. A call that it does not take, or a result of another type, is the user's to see."""

    __wrapped__: Callable[..., Any]
    name: str
    returns: Any
    error: Callable[[str, str], SubjectError]

    def __call__(self, *given: Any, **named: Any) -> Any:
        try:
            result = self.__wrapped__(*given, **named)
        except TypeError:
            if why := _refuses(self.__wrapped__, given, named):
                raise self.error(self.name, why) from None
            raise
        if self.returns in (None, NoneType) or fits(result, self.returns):
            return result
        raise self.error(self.name, f"it returned {result!r:.60}, and {_text(self.returns)} is needed")


def misfit(value: Any, hint: Any) -> str:
    """What is wrong with a declaration; empty where nothing is."""
    if not fits(value, hint):
        more = f"give [{value!r}]" if of_kind(hint, Sequence) else "give one"
        if (choices := get_args(of_kind(hint, Literal))) and isinstance(value, str):
            more = nearest(value, choices).rstrip(".")
        return f"{_text(hint)} is needed: {more}"
    if of_kind(hint, Sequence) and hasattr(value, "__len__") and len(value) == 0:
        return "it is empty: give at least one"
    takes = (*get_args(of_kind(hint, Callable)), ...)[0]
    return _refuses(value, takes, {}) if isinstance(takes, list) and callable(value) else ""


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of this type. A number may be a tensor of one entry, a list anything that has places."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if hint is Any or kind in (Union, UnionType, Literal):
        return hint is Any or any(value == part if kind is Literal else fits(value, part) for part in inside)
    if kind in (float, int):
        number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        return number and (kind is float or value % 1 == 0)
    if kind is tuple:
        return isinstance(value, tuple | list) and len(value) == len(inside) and all(map(fits, value, inside))
    if kind in (Sequence, Iterable):
        others = str if kind is Iterable else str | Mapping | set
        each = value if isinstance(value, tuple | list) else ()
        return hasattr(value, "__iter__") and not isinstance(value, others) and all(fits(v, inside[0]) for v in each)
    return isinstance(value, kind) and (kind is not Mapping or all(fits(v, inside[1]) for v in value.values()))


def of_kind(hint: Any, kind: Any) -> Any:
    """The type, or the one of a union, that is of this kind."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((part for part in parts if get_origin(part) is kind), None)


def _text(hint: Any) -> str:
    """``Sequence[str]``, without the names of modules."""
    return re.sub(r"<class '(.*?)'>", r"\1", re.sub(r"\b([a-z_]+\.)+(?=[A-Z])", "", str(hint)))


def _refuses(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> str:
    """What it takes, where that is something else; empty where it takes these, or is built in."""
    with suppress(TypeError, ValueError):  # built in, without a signature
        signature = inspect.signature(function)
        try:
            signature.bind(*given, **named)
        except TypeError:
            many = ", ".join([f"{len(given)} argument{'s' if len(given) != 1 else ''}", *(f"{n}=…" for n in named)])
            return f"it is called with {many} and takes {signature}"
    return ""

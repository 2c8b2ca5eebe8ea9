"""Whether a declaration is of the kind that its field's type names, and what a declared function returns too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from earnest_audit.errors import SubjectError, nearest

WORDS: dict[Any, str] = {
    Tensor: "a tensor", nn.Module: "a module", float: "a number", int: "a whole number", bool: "True or False",
    str: "a text", Sequence: "a list", list: "a list", Iterable: "a list", Mapping: "a dict", Callable: "a function",
    AbstractContextManager: "a context manager", torch.optim.Optimizer: "an optimizer", NoneType: "None",
}  # fmt: skip


@dataclass
class Called:
    """A declared function. A call that it does not take, or a result of another kind, is the user's to see."""

    __wrapped__: Callable[..., Any]
    name: str
    kind: Any
    error: Callable[[str, str], SubjectError]

    def __call__(self, *given: Any, **named: Any) -> Any:
        try:
            result = self.__wrapped__(*given, **named)
        except TypeError:
            if why := _refuses(self.__wrapped__, given, named):
                raise self.error(self.name, why) from None
            raise
        returns = (*get_args(self.kind), Any)[1]
        if returns in (None, NoneType) or fits(result, returns):
            return result
        raise self.error(self.name, f"it returned {result!r:.60}, and {words(returns)} is needed")


def misfit(value: Any, hint: Any) -> str:
    """What is wrong with a declaration; empty where nothing is."""
    if not fits(value, hint):
        allowed = map(str, get_args(of_kind(hint, Literal)))
        more = nearest(value, allowed).rstrip(".") if isinstance(value, str) and of_kind(hint, Literal) else ""
        more = more or (f"give [{value!r}]" if isinstance(value, str) and of_kind(hint, Sequence) else "give one")
        return f"{words(hint)} is needed: {more}"
    if of_kind(hint, Sequence) and hasattr(value, "__len__") and len(value) == 0:
        return "it is empty: give at least one"
    takes = (*get_args(of_kind(hint, Callable)), ...)[0]
    return _refuses(value, takes, {}) if isinstance(takes, list) and callable(value) else ""


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of this type. A number may be a tensor of one entry, a list anything that has places."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if hint is Any or kind in (Union, UnionType):
        return hint is Any or any(fits(value, part) for part in inside)
    if kind is Literal:
        return value in inside
    if kind in (float, int):
        number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        return number and (kind is float or value % 1 == 0)
    if kind is tuple:
        return isinstance(value, tuple | list) and len(value) == len(inside) and all(map(fits, value, inside))
    if kind in (Sequence, list, Iterable):
        listed = hasattr(value, "__iter__" if kind is Iterable else "__getitem__") and not isinstance(value, str)
        each = value if isinstance(value, tuple | list) else ()
        return listed and (kind is Iterable or not isinstance(value, Mapping)) and all(fits(v, inside[0]) for v in each)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(fits(v, inside[1]) for v in value.values())
    return isinstance(value, kind)


def words(hint: Any) -> str:
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind is tuple:
        return f"a tuple ({', '.join(map(words, inside))})"
    if kind in (Union, UnionType, Literal):
        return " or ".join(dict.fromkeys(repr(part) if kind is Literal else words(part) for part in inside))
    parts = f" (each: {words(inside[-1])})" if kind in (Sequence, Iterable, Mapping) and inside[-1] is not Any else ""
    return f"{WORDS.get(kind) or f'a {kind.__name__}'}{parts}"


def of_kind(hint: Any, kind: Any) -> Any:
    """The type, or the one of a union, that is of this kind."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((part for part in parts if get_origin(part) is kind), None)


def _refuses(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> str:
    """What it takes, where that is something else; empty where it takes these, or is built in."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*given, **named)
    except TypeError:
        many = ", ".join([f"{len(given)} argument{'s' if len(given) != 1 else ''}", *(f"{n}=…" for n in named)])
        return f"it is called with {many} and takes {signature}"
    return ""

"""Check every annotated shape of the package while the tests run.

conftest.py installs jaxtyping's import hook with `check` as its type checker: beartype, applied to the annotations that
name a tensor's shape and to no other. mypy judges the rest, and beartype cannot (`Self`, names for typing only).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from beartype import beartype

# jaxtyping's array types, as in `Float[Tensor, "N d"]` or `Float[Tensor, "N"] | None`
_SHAPE = re.compile(
    r"\b(?:Shaped|Num|Real|Inexact|Float|BFloat16|Float16|Float32|Float64|Integer|Int|UInt|Int32|Int64|UInt8|Bool)\[(?:torch\.)?Tensor,"
)


def _names_a_shape(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return bool(_SHAPE.search(text))


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(fn)` by its tensor shapes alone; `fn` itself where it names none."""
    everything = dict(fn.__annotations__)
    shapes = {name: hint for name, hint in everything.items() if _names_a_shape(hint)}
    if not shapes:
        return fn
    fn.__annotations__ = shapes
    try:
        checked = beartype(fn)
    finally:
        fn.__annotations__ = everything
    return checked

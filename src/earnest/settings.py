"""Settings: dataclass fields that declare their type, range, meaning and recipe key in one line.

    @dataclass(frozen=True)
    class AdamW(Checked):
        lr: float = setting(1e-4, "the learning rate", at_least=0.0)

The annotation gives the type, ``setting`` the range and the meaning, and the name is the key in a recipe. ``Checked``
refuses an instance with a value out of range, ``make`` builds an instance from a recipe's mapping, ``plain`` is its
inverse. The recipe's schema, ``earnest objectives`` and ``earnest adapters`` read the same line through ``settings``.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar

from earnest.errors import ConfigError, EarnestError, nearest

T = TypeVar("T")


class FieldProblem(ConfigError):
    """One key of a part of a recipe is wrong; the sentence begins with the key, relative to that part."""


@dataclass(frozen=True)
class SettingSpec:
    """The type and range of a field. Bounds apply to a number, or to every number of a list."""

    doc: str
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    multiple_of: int | None = None
    choices: tuple[str, ...] = ()
    types: tuple[Any, ...] = ()  # the members of the annotation, None left out
    optional: bool = False  # whether None is one of them

    @property
    def boolean(self) -> bool:
        return self.types == (bool,)

    @property
    def nested(self) -> dict[str, type]:
        """The dataclasses that the value may be, by the ``kind`` that selects one in a recipe."""
        return {getattr(t, "kind", t.__name__): t for t in self.types if is_dataclass(t) and isinstance(t, type)}

    @property
    def allowed(self) -> str:
        """The range in words."""
        words = " or ".join(self._words(t) for t in self.types)
        return f"{words}, or none" if self.optional else words

    def _words(self, kind: Any, count: str = "") -> str:
        plural = count != ""
        if self.choices:
            return " or ".join(repr(c) for c in self.choices)
        if typing.get_origin(kind) is tuple:
            items = typing.get_args(kind)
            return self._words(items[0], "a list of" if items[-1] is ... else f"a list of {len(items)}")
        if typing.get_origin(kind) is dict:
            return "a mapping of texts to texts"
        if kind is bool:
            return "true or false"
        if kind is str:
            return f"{count} texts that are not empty" if plural else "a text that is not empty"
        if is_dataclass(kind):
            return f"{getattr(kind, '__name__', kind)}(…)"
        lower = "" if self.above is None else f"above {self.above:g}"
        lower = lower if self.at_least is None else f"at least {self.at_least:g}"
        upper = "" if self.below is None else f"below {self.below:g}"
        upper = upper if self.at_most is None else f"at most {self.at_most:g}"
        bounds = " and ".join(part for part in (lower, upper) if part)
        number = f"{'whole' if kind is int else 'finite'} number{'s' if plural else ''}"
        even = "" if self.multiple_of is None else f" and a multiple of {self.multiple_of}"
        return f"{count or 'a'} {number} {bounds}".rstrip() + even

    def allows(self, value: object) -> bool:
        return self.optional if value is None else any(self._fits(value, t) for t in self.types)

    def _fits(self, value: object, kind: Any) -> bool:
        if typing.get_origin(kind) is tuple:
            items = typing.get_args(kind)
            if not isinstance(value, tuple) or (items[-1] is not ... and len(value) != len(items)):
                return False
            return all(self._fits(item, items[0]) for item in value)
        if typing.get_origin(kind) is dict:
            return isinstance(value, dict) and all(isinstance(t, str) and t for t in (*value, *value.values()))
        if self.choices:
            return value in self.choices
        if kind is bool:
            return isinstance(value, bool)
        if kind is str:
            return isinstance(value, str) and value != ""
        if is_dataclass(kind):
            return type(value) is kind
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            return False
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    def problem(self, name: str, value: object) -> str:
        """The error for ``value``: the key, what is allowed, the value and the key's meaning."""
        hint = nearest(value, self.choices) if isinstance(value, str) else ""
        hint = f" ({hint})" if hint.startswith("did you mean") else ""  # the choices themselves are listed already
        return f"{name}: must be {self.allowed}, got {value!r}{hint}. Meaning: {self.doc}."


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    multiple_of: int | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its meaning and its range; without a default it is required."""
    return field(
        default=default, metadata={"setting": SettingSpec(doc, above, at_least, below, at_most, multiple_of, choices)}
    )


def settings(kind: Any) -> tuple[tuple[str, Any, SettingSpec], ...]:
    """(name, default, what it may be) of every setting of a dataclass, or of an instance of one.

    The default is ``dataclasses.MISSING`` where the setting is required.
    """
    return _declared(kind if isinstance(kind, type) else type(kind))


@functools.cache
def _declared(cls: type) -> tuple[tuple[str, Any, SettingSpec], ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for f in fields(cls):
        what = f.metadata.get("setting")
        if isinstance(what, SettingSpec):
            hint = hints[f.name]
            members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
            literal = [typing.get_args(m) for m in members if typing.get_origin(m) is typing.Literal]
            types = tuple(m for m in members if m is not NoneType)
            choices = what.choices or (literal[0] if literal else ())
            found.append((f.name, f.default, replace(what, types=types, choices=choices, optional=types != members)))
    return tuple(found)


@dataclass(frozen=True)
class FieldInfo:
    """One setting in words."""

    name: str
    default: str
    allowed: str
    doc: str


def field_infos(kind: type) -> tuple[FieldInfo, ...]:
    """Every setting of a dataclass in words."""
    words = {MISSING: "required", None: "none"}
    return tuple(
        FieldInfo(name, words[default] if default in (MISSING, None) else str(default), what.allowed, what.doc)
        for name, default, what in settings(kind)
    )


class Checked:
    """Base of frozen dataclasses of settings: an instance with a value out of range cannot be made."""

    error: ClassVar[type[EarnestError]] = ConfigError

    @property
    def label(self) -> str:
        """Its name in error messages."""
        return type(self).__name__

    def __post_init__(self) -> None:
        for name, _, what in settings(self):
            if not what.allows(value := getattr(self, name)):
                raise self.error(f"{self.label}.{what.problem(name, value)}")
        self.validate()

    def validate(self) -> None:
        """Raise if values that are each legal contradict each other."""


def make(cls: type[T], values: Mapping[str, Any]) -> T:
    """``cls(**values)`` from what YAML holds: lists become tuples, and mappings the nested dataclasses. An unknown,
    missing or illegal key raises ``FieldProblem``."""
    declared = {name: what for name, _, what in settings(cls)}
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]  # T is a dataclass
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise FieldProblem(f"{key}: unknown key; {nearest(key, known)}")
        what = declared.get(key)
        made[key] = value if what is None else _converted(key, value, what)
        if what is not None and not what.allows(made[key]):
            raise FieldProblem(what.problem(key, value))
    for name, f in known.items():
        if f.default is MISSING and f.default_factory is MISSING and name not in made:
            raise FieldProblem(f"{name}: is required; give it a value.")
    return cls(**made)


def _converted(key: str, value: Any, what: SettingSpec) -> Any:
    if isinstance(value, list) and any(typing.get_origin(t) is tuple for t in what.types):
        return tuple(value)
    kinds = what.nested
    if isinstance(value, str) and len(kinds) > 1 and str not in what.types:
        value = {"kind": value}  # a kind with its defaults
    if not isinstance(value, Mapping) or not kinds:
        return value
    kind = value.get("kind", "") if len(kinds) > 1 else next(iter(kinds))
    if kind not in kinds:
        raise FieldProblem(f"{key}.kind: must be {' or '.join(map(repr, sorted(kinds)))}, got {kind!r}.")
    try:
        return make(kinds[kind], {k: v for k, v in value.items() if k != "kind"})
    except FieldProblem as problem:
        raise FieldProblem(f"{key}.{problem}") from None


def plain(owner: Any) -> dict[str, Any]:
    """A dataclass instance as the mapping from which ``make`` builds it again, with every default."""
    found: dict[str, Any] = {}
    declared = {name: what for name, _, what in settings(owner)}
    for f in fields(owner):
        if f.init:
            value = getattr(owner, f.name)
            if is_dataclass(value):
                kinds = declared[f.name].nested
                kind = {"kind": next(k for k, t in kinds.items() if t is type(value))} if len(kinds) > 1 else {}
                value = kind | plain(value)
            found[f.name] = list(value) if isinstance(value, tuple) else value
    return found

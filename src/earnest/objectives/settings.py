"""Fields of terms that say what they mean and refuse what they cannot obey.

``setting`` is ``dataclasses.field`` with a sentence and a range; ``validate`` holds every field of a term against its
own. The same lines are what ``earnest objectives`` prints and what the audit turns as knobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from earnest.errors import ObjectiveError, nearest


@dataclass(frozen=True)
class Setting:
    """What a field may be. ``nested`` maps a kind to the dataclass that a mapping (from YAML) is made into."""

    doc: str
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    integer: bool = False
    boolean: bool = False
    optional: bool = False
    nested: Mapping[str, str] | None = None

    @property
    def allowed(self) -> str:
        """The range in words."""
        if self.choices:
            words = " or ".join(repr(c) for c in self.choices)
        elif self.boolean:
            words = "true or false"
        elif self.nested is not None:
            words = " or ".join(f"{name}(…)" for name in sorted(self.nested.values()))
        else:
            lower = "" if self.above is None else f"above {self.above:g}"
            lower = lower if self.at_least is None else f"at least {self.at_least:g}"
            upper = "" if self.below is None else f"below {self.below:g}"
            upper = upper if self.at_most is None else f"at most {self.at_most:g}"
            bounds = " and ".join(part for part in (lower, upper) if part)
            words = f"a{' whole' if self.integer else ' finite'} number {bounds}".rstrip()
        return f"{words}, or none" if self.optional else words


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    integer: bool = False,
    optional: bool = False,
    nested: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field with its sentence and its range.

    One that is ``optional`` or whose default is None may be None.
    """
    what = Setting(
        doc,
        above,
        at_least,
        below,
        at_most,
        choices,
        integer,
        boolean=isinstance(default, bool),
        optional=optional or default is None,
        nested=nested,
    )
    return field(default=default, metadata={"setting": what})


def settings(kind: Any) -> Iterator[tuple[str, Any, Setting]]:
    """(name, default, what) of every setting of a dataclass or an instance of one.

    Default is MISSING where required.
    """
    for f in fields(kind):
        what = f.metadata.get("setting")
        if isinstance(what, Setting):
            yield f.name, f.default, what


def validate(owner: Any, label: str) -> None:
    """Raise where a field of ``owner`` is outside its range."""
    for name, _, what in settings(owner):
        value = getattr(owner, name)
        if value is None and what.optional:
            continue
        if not _legal(value, what):
            hint = f" ({nearest(value, what.choices)})" if what.choices and isinstance(value, str) else ""
            raise ObjectiveError(f"{label}: {name} must be {what.allowed}, got {value!r}{hint}. It is: {what.doc}")


def _legal(value: object, what: Setting) -> bool:
    if what.choices:
        return value in what.choices
    if what.boolean:
        return isinstance(value, bool)
    if what.nested is not None:
        return type(value).__name__ in what.nested.values()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (what.integer and not isinstance(value, int)):
        return False
    return (
        math.isfinite(value)
        and (what.above is None or value > what.above)
        and (what.at_least is None or value >= what.at_least)
        and (what.below is None or value < what.below)
        and (what.at_most is None or value <= what.at_most)
    )

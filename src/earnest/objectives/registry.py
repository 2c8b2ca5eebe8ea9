"""Every term by its kind: what YAML names, what ``earnest objectives`` lists, and what the registry's tests run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

from earnest.errors import ObjectiveError, nearest
from earnest.objectives import settings
from earnest.objectives.base import Objective, Term, Weighted

OBJECTIVES: dict[str, type[Term]] = {}

T = TypeVar("T", bound=type[Term])


def register(term: T) -> T:
    """Class decorator: makes a term known by its ``kind``."""
    assert term.kind not in OBJECTIVES, f"{term.kind} is registered twice"
    OBJECTIVES[term.kind] = term
    return term


def build(kind: str, **values: Any) -> Term:
    """The term of this kind with these fields; nested settings may be mappings, as YAML has them."""
    if kind not in OBJECTIVES:
        raise ObjectiveError(f"unknown objective {kind!r}: {nearest(kind, OBJECTIVES)}")
    return _make(OBJECTIVES[kind], kind, values)


def build_objective(terms: Sequence[Mapping[str, Any]]) -> Objective:
    """The sum that a recipe's list of ``{kind, weight?, name?, fields…}`` describes."""
    if not terms:
        raise ObjectiveError("the objective has no term; list at least one, e.g. objective: [{kind: grpo}].")
    weighted = []
    for place, entry in enumerate(terms):
        if "kind" not in entry:
            raise ObjectiveError(
                f"term {place + 1} of the objective has no kind; known: {', '.join(sorted(OBJECTIVES))}."
            )
        values = {key: value for key, value in entry.items() if key not in ("kind", "weight")}
        weighted.append(Weighted(entry.get("weight", 1.0), build(entry["kind"], **values)))
    return Objective(tuple(weighted))


def _make(target: type, label: str, values: Mapping[str, Any]) -> Any:
    known = {f.name: f for f in fields(target)}
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ObjectiveError(f"{label}: has no field {key!r}; {nearest(key, known)}")
        what = known[key].metadata.get("setting")
        made[key] = (
            _nested(f"{label}.{key}", what.nested, value)
            if what and what.nested and isinstance(value, Mapping)
            else value
        )
    if missing := [
        n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING and n not in made
    ]:
        raise ObjectiveError(f"{label}: the field {missing[0]!r} has no default; give it a value.")
    return target(**made)


def _nested(label: str, kinds: Mapping[str, str], value: Mapping[str, Any]) -> Any:
    """A mapping into the dataclass that the setting allows; ``kind`` chooses where there are several."""
    kind = value.get("kind", "") if len(kinds) > 1 else next(iter(kinds))
    if kind not in kinds:
        raise ObjectiveError(f"{label}: kind must be one of {', '.join(sorted(kinds))}, got {kind!r}.")
    catalogue = importlib.import_module("earnest.objectives")
    return _make(getattr(catalogue, kinds[kind]), label, {k: v for k, v in value.items() if k != "kind"})


@dataclass(frozen=True)
class FieldInfo:
    """One field of a term, for people."""

    name: str
    default: str
    allowed: str
    doc: str


@dataclass(frozen=True)
class TermInfo:
    """One term, for people: what ``earnest objectives`` prints."""

    kind: str
    cls: str
    summary: str
    paper: str
    equation: str
    roles: tuple[str, ...]
    signals: tuple[str, ...]
    more_signals: tuple[tuple[str, str], ...]  # (signal, the setting with which it is read, too)
    laws: tuple[str, ...]
    fields: tuple[FieldInfo, ...]


def describe() -> list[TermInfo]:
    """Every registered term, by kind."""
    return [_describe(OBJECTIVES[kind]) for kind in sorted(OBJECTIVES)]


def _describe(term: type[Term]) -> TermInfo:
    rows = []
    for name, default, what in settings.settings(term):
        shown = "required" if default is MISSING else "none" if default is None else str(default)
        rows.append(FieldInfo(name, shown, what.allowed, what.doc))
    return TermInfo(
        kind=term.kind,
        cls=term.__name__,
        summary=(term.__doc__ or "").strip().splitlines()[0],
        paper=term.paper,
        equation=term.equation,
        roles=term.roles,
        signals=tuple(sorted(term.example().signals())),
        more_signals=tuple(sorted(_conditional(term).items())),
        laws=tuple(sorted(term.laws)),
        fields=tuple(rows),
    )


def _conditional(term: type[Term]) -> dict[str, str]:
    """Signals that one setting other than the default asks for, with that setting."""
    plain = term.example()
    found: dict[str, str] = {}
    catalogue = importlib.import_module("earnest.objectives")
    for name, _, what in settings.settings(term):
        values: list[Any] = [*what.choices, *([True, False] if what.boolean else [])]
        values += [getattr(catalogue, cls)() for cls in (what.nested or {}).values()]
        for value in values:
            try:
                wanted = replace(plain, **{name: value}).signals()
            except ObjectiveError:  # it contradicts another default
                continue
            said = value if isinstance(value, str | bool) else f"{type(value).__name__}(…)"
            for signal in wanted - plain.signals():
                found.setdefault(signal, f"{name}={said}")
    return found

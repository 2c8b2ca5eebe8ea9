"""Every term by its kind: the name in YAML and in ``earnest objectives``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from earnest.deprecated import warn_renamed
from earnest.errors import ObjectiveError
from earnest.objectives.base import Objective, Term, Weighted
from earnest.registry import Registry
from earnest.settings import FieldInfo, FieldProblem, field_infos, make, settings

OBJECTIVES: Registry[type[Term]] = Registry("objective", "earnest.objectives", ObjectiveError)

T = TypeVar("T", bound=type[Term])


def register(term: T) -> T:
    """Class decorator: registers a term by its ``kind``."""
    if "dormant_at_source" in term.laws:
        warn_renamed("the law dormant_at_source", "inactive_at_source")
        term.laws = term.laws - {"dormant_at_source"} | {"inactive_at_source"}
    OBJECTIVES.add(term.kind, term)
    return term


def build(kind: str, **values: Any) -> Term:
    """The term of this kind with these fields; nested settings may be mappings, as in YAML."""
    try:
        return make(OBJECTIVES.find(kind), values)
    except FieldProblem as problem:
        raise ObjectiveError(f"{kind}.{problem}") from None


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


@dataclass(frozen=True)
class TermInfo:
    """The description of a term that ``earnest objectives`` prints."""

    kind: str
    cls: str
    summary: str
    paper: str
    equation: str
    roles: tuple[str, ...]
    signals: tuple[str, ...]
    more_signals: tuple[tuple[str, str], ...]  # (signal, the setting with which the term reads it)
    laws: tuple[str, ...]
    fields: tuple[FieldInfo, ...]


def describe() -> list[TermInfo]:
    """Every registered term, by kind."""
    return [info_of(OBJECTIVES[kind]) for kind in sorted(OBJECTIVES)]


def info_of(term: type[Term]) -> TermInfo:
    """The description of one term."""
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
        fields=tuple(field for field in field_infos(term) if field.name != "name"),
    )


def _conditional(term: type[Term]) -> dict[str, str]:
    """The signals that are read only with one setting other than the default, each with that setting."""
    default = term.example()
    found: dict[str, str] = {}
    for name, _, what in settings(term):
        values: list[Any] = [*what.choices, *([True, False] if what.boolean else [])]
        values += [nested() for nested in what.nested.values()]
        for value in values:
            try:
                wanted = replace(default, **{name: value}).signals()
            except ObjectiveError:  # the setting contradicts another default
                continue
            shown = value if isinstance(value, str | bool) else f"{type(value).__name__}(…)"
            for signal in wanted - default.signals():
                found.setdefault(signal, f"{name}={shown}")
    return found

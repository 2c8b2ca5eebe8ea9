"""The settings of an objective's terms, also nested ones, as the numbers (``knobs``) and options of a ``Step``.

Examples: ``grpo.clip``, ``grpo.correction.cap``, ``distill.wrap.threshold``. ``grpo.weight`` is the term's weight in
the sum, so no term may have a field of that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from earnest.objectives.base import Objective, Term, Weighted
from earnest.settings import SettingSpec, settings
from earnest_audit.facts import Setting
from earnest_audit.frontends import names
from earnest_audit.laws.knobs import candidates

SCHEDULE = ("steps",)  # the length of a schedule acts over steps, as the fields of ``beyond_step`` do


def declared(live: Sequence[Weighted], summed: Sequence[str]) -> dict[str, Setting]:
    """Every setting with the kind of its name; the weights of the terms ``summed``, and modes, are declared as such."""
    found = names.declared(knobs(live))
    for name in (f"{label}.weight" for label in summed):
        found[name] = replace(found[name], kind="weight")
    twins = frozenset(pair for w in live for pair in w.term.twins)
    return found | {n: Setting(m[0], modes=m[1:], twins=twins) for n, m in options(live).items()}


def knobs(live: Sequence[Weighted]) -> dict[str, Any]:
    """Every number and every true or false of a live term, and its weight if there are several terms."""
    found: dict[str, Any] = {}
    for w in live:
        for path, value, what in _fields(w.term):
            assert path != "weight", f"{w.term.label}: a field called 'weight' would hide the term's own; rename it."
            if not isinstance(value, int | float) or what.choices:
                continue
            # The support inside a wrapper, for example, has no other legal value.
            if any(_legal(w.term, path, other) for other in candidates(value)):
                found[f"{w.term.label}.{path}"] = value
        if len(live) > 1:
            found[f"{w.term.label}.weight"] = w.weight
    return found


def options(live: Sequence[Weighted]) -> dict[str, tuple[Any, ...]]:
    """Every field with choices, the current choice first; choices that contradict other fields are left out."""
    found: dict[str, tuple[Any, ...]] = {}
    for w in live:
        for path, present, what in _fields(w.term):
            modes = [present, *(c for c in what.choices if c != present and _legal(w.term, path, c))]
            if what.choices and len(modes) > 1:
                found[f"{w.term.label}.{path}"] = tuple(modes)
    return found


def rebuild(objective: Objective, changed: Mapping[str, Any]) -> Objective:
    """The objective with these settings and options in place of its own."""
    terms = []
    for w in objective.terms:
        prefix = f"{w.term.label}."
        mine = {k.removeprefix(prefix): v for k, v in changed.items() if k.startswith(prefix)}
        weight, term = mine.pop("weight", w.weight), w.term
        for path, value in mine.items():
            term = _with(term, path, value)
        terms.append(Weighted(weight, term))
    return Objective(tuple(terms))


def _fields(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any, SettingSpec]]:
    """(path, value, what it may be) of every setting that acts within a step, depth first."""
    beyond = (*getattr(owner, "beyond_step", ()), *SCHEDULE)
    for name, _, what in settings(owner):
        value = getattr(owner, name)
        if name in beyond or value is None:
            continue
        if name == "normalised" and getattr(owner, "alpha", None) in (0.0, 1.0):
            continue  # α(1-α) is 0 there: the factor's limit is 1, with and without
        if what.nested:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, what


def _with(owner: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    present = getattr(owner, name)
    new = _with(present, rest, value) if rest else value
    return owner if new == present else replace(owner, **{name: new})


def _legal(term: Term, path: str, value: Any) -> bool:
    try:
        changed: Term = _with(term, path, value)
    except ValueError:
        return False
    return changed.signals() == term.signals()

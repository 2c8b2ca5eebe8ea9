"""``Step`` that also takes the names of the first edition, with a warning; they end with the next release.

Step(knobs={"beta": 0.04}, terms={"kl": "beta"})  is
Step(settings={"beta": 0.04}, metrics={"kl": Metric(weight="beta")})
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from earnest_audit.errors import EarnestError, nearest
from earnest_audit.facts import Metric, Setting
from earnest_audit.step import Step as Step

NAMES = ("knobs", "options", "terms", "switches", "pure", "inert", "twins", "still", "neutral", "fixed")


@dataclass(frozen=True)
class Raises:
    """In ``terms``: minimising the term raises its metric (an entropy bonus), instead of lowering it."""

    knob: str


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """These keyword arguments of ``Step``, with facts in place of the old names."""
    old, new = {n: v for n, v in given.items() if n in NAMES}, {n: v for n, v in given.items() if n not in NAMES}
    if not old:
        return new
    text = f"{', '.join(old)}: declare settings={{name: Setting(…)}} and metrics={{name: Metric(…)}} instead."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    settings = {**new.get("settings", {}), **old.get("knobs", {})}
    metrics = {n: m if isinstance(m, Metric) else Metric(*m) for n, m in new.get("metrics", {}).items()}

    def fact(name: str, **changed: Any) -> None:
        metrics[name] = replace(metrics.get(name, Metric()), **changed)

    def setting(name: str, **changed: Any) -> None:
        if name not in settings:
            raise EarnestError(f"{name!r} is no setting: {nearest(name, settings)}")
        present = settings[name]
        settings[name] = replace(present if isinstance(present, Setting) else Setting(present), **changed)

    for name, modes in old.get("options", {}).items():
        pairs = frozenset(pair for pair in old.get("twins", ()) if set(pair) <= set(modes))
        settings[name] = Setting(modes[0], modes=tuple(modes[1:]), twins=pairs)
    for metric, term in old.get("terms", {}).items():
        fact(metric, weight=term.knob if isinstance(term, Raises) else term, raises=isinstance(term, Raises))
    for metric in old.get("fixed", ()):
        fact(metric, weight=1.0)
    for metric in old.get("still", ()):
        fact(metric, moves=False)
    for metric, value in old.get("neutral", {}).items():
        fact(metric, neutral=value)
    for name, value in old.get("pure", {}).items():
        setting(name, pure=value)
    for kind, names in (("weight", old.get("switches", ())), ("inert", old.get("inert", ()))):
        for name in names:
            setting(name, kind=kind)
    return {**new, "settings": settings, "metrics": metrics}


def _with_old_names(made: Callable[..., None]) -> Callable[..., None]:
    """The initialiser of ``Step``, which also takes the old names."""

    @wraps(made)
    def init(self: Step, *args: Any, **given: Any) -> None:
        made(self, *args, **renamed(given))

    return init


Step.__init__ = _with_old_names(Step.__init__)  # type: ignore[method-assign]

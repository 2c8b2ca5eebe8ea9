"""DF: two paths that claim the same objective have the same gradient: fused and eager, merged and not, checkpointed
or not."""

from __future__ import annotations

from collections.abc import Iterator

from earnest.audit.law import Law, not_declared
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if not step.paths:
        yield not_declared("DF", "other paths", "paths={name: another function with the loss's signature}")
        return
    with probe.kicked():
        base = probe.off_policy()
        origin = probe.gradient(base)
        for name, other in step.paths.items():
            theirs = probe.gradient(base, loss=other)
            change = origin.distance(theirs)
            factor = theirs.best_scale(origin)
            constant = theirs.distance(origin.times(factor)) <= probe.tolerance
            yield LAW.finding(
                f"path {name}",
                f"its gradient differs by {change:.2g}",
                f"≤ {probe.tolerance:.1g}",
                change <= probe.tolerance,
                f"{name} is {factor:.3g} times the other: a normaliser or a factor was lost." if constant else
                f"{name} computes another objective: an argument that one path reads is missing in the other, or an "
                "option is off.",
            )  # fmt: skip


LAW = Law(
    code="DF",
    name="paths",
    sentence="Two paths that claim the same objective have the same gradient.",
    needs="paths={name: function}",
    how="Both gradients from a kicked, off-policy state, where no term is at its zero.",
    traps="Only this, or the written formula, sees a constant factor.",
    caught="Liger #1082, verl #1440 and #2016, transformers #26221",
    check=check,
)

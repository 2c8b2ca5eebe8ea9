"""The tables, in markdown. Every arm has a row, also one without results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.hacking.plan import ARMS, HOLES
from experiments.hacking.results import (
    COMPARED,
    Estimate,
    arm_series,
    at_end,
    leaks,
    left_out,
    matched,
    matched_level,
    over_seeds,
    refreshes,
)

SHORT = COMPARED
NOTHING = "missing"


def arms_of(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The arms of this experiment's plan."""
    return tuple(ARMS) if results["config"].get("full") else SHORT


def tables(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """Title → lines of markdown."""
    found = {"Arms and controls": main_table(results), "Kept against ablated": kept_table(results)}
    if results["config"].get("refresh"):
        found["Refreshed directions"] = refresh_table(results)
    if results["config"].get("full"):
        found["Leave one hole out"] = left_out_table(results)
        found["With a teacher pool"] = pool_table(results)
    return found


def main_table(results: Mapping[str, Any]) -> list[str]:
    by_arm = {arm: arm_series(results, arm) for arm in arms_of(results)}
    there = {arm: series for arm, series in by_arm.items() if series}
    rows = []
    if "none" in there:
        # Every arm is the base model at initialization, so all of them begin here.
        start = {seed: points[:1] for seed, points in there["none"].items()}
        rates = [str(at_end(start, r)) for r in ("solved", "exploited", "exploited_of_attempted")]
        rows.append(["every arm at step 0", str(len(start)), *rates[:2], "", "", rates[2], "", ""])
    for arm, series in by_arm.items():
        if not series:
            rows.append([arm, "0", *[NOTHING] * 7])
            continue
        level, leak = matched(there, arm), leaks(results, arm)
        rows.append(
            [
                arm,
                str(len(series)),
                str(at_end(series, "solved")),
                str(at_end(series, "exploited")),
                str(level),
                "" if level.step is None else f"{level.step:.0f}",
                str(at_end(series, "exploited_of_attempted")),
                _leak(leak["gradient"]),
                _leak(leak["update"]),
            ]
        )
    head = ["arm", "seeds", "solved, end", "exploited, end", "exploited, matched", "matched at step"]
    return markdown([*head, "exploited of attempts", "leak, gradient", "leak, update"], rows)


def levels(results: Mapping[str, Any]) -> str:
    """The matched solve rates, for the line under the table."""
    by_arm = {a: s for a in arms_of(results) if (s := arm_series(results, a))}
    seeds = sorted({seed for s in by_arm.values() for seed in s})
    found = [matched_level(by_arm, seed) for seed in seeds]
    return ", ".join(NOTHING if level is None else f"{level:.2f}" for level in found)


def kept_table(results: Mapping[str, Any]) -> list[str]:
    """Route's total policy, which is the unguarded one, against the same without the quarantine; paired by seed."""
    kept, ablated = arm_series(results, "none"), arm_series(results, "route")
    rows = []
    for seed in sorted(set(kept) & set(ablated)):
        a, b = kept[seed][-1], ablated[seed][-1]
        rows.append([str(seed), *(f"{p[rate]:.2f}" for rate in ("exploited", "solved", "attempted") for p in (a, b))])
    both = [(kept[seed][-1], ablated[seed][-1]) for seed in sorted(set(kept) & set(ablated))]
    if both:
        changes = [over_seeds([b[rate] - a[rate] for a, b in both]) for rate in ("exploited", "solved", "attempted")]
        rows.append(["ablated − kept", *(cell for change in changes for cell in ("", str(change)))])
    head = ["seed", "exploited, kept", "exploited, ablated", "solved, kept", "solved, ablated"]
    return markdown([*head, "attempted, kept", "attempted, ablated"], rows)


def refresh_table(results: Mapping[str, Any]) -> list[str]:
    """How far later directions are from the current ones, and how often they replace them."""
    rows = []
    for arm in arms_of(results):
        if (found := refreshes(results, arm)) is not None:
            cells = [str(found[what]) for what in ("overlap", "heading")]
            rows.append([arm, *cells, f"{found['adopted'].mean:.0%}"])
    return markdown(["refreshed", "overlap with the old", "heading", "adopted"], rows)


def left_out_table(results: Mapping[str, Any]) -> list[str]:
    """Exploited rate at the end on the prompts of the hole that the directions were not made from."""
    rows = []
    for hole in HOLES:
        cells = []
        seeds = set(left_out(results, "route", hole))
        for arm in ("none", "erase", "route", "erase:random", "route:random"):
            # Only guards with true directions depend on holes; the others have no version without one.
            found = left_out(results, arm, hole) if arm in ("erase", "route") else arm_series(results, arm)
            values = [points[-1]["by_hole"][hole] for seed, points in found.items() if seed in seeds]
            few = "" if len(values) == len(seeds) else f" ({len(values)} of {len(seeds)} seeds)"
            cells.append(f"{over_seeds(values)}{few}" if values else NOTHING)
        rows.append([hole, str(len(seeds)), *cells])
    return markdown(["hole left out", "seeds", "none", "erase", "route", "erase:random", "route:random"], rows)


def pool_table(results: Mapping[str, Any]) -> list[str]:
    rows = []
    for arm in ("none", "route"):
        series = arm_series(results, arm, pool=True)
        rates = ("solved", "exploited", "exploited_of_attempted")
        cells = [str(at_end(series, rate)) for rate in rates] if series else [NOTHING] * 3
        rows.append([arm, str(len(series)), *cells])
    return markdown(["with a teacher pool", "seeds", "solved, end", "exploited, end", "exploited of attempts"], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = "| " + " | ".join(head) + " |"
    return [line, "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def _leak(leak: Estimate | None) -> str:
    return NOTHING if leak is None else f"{leak.mean:.3f}"

"""The measurements of all jobs in one file, ``results.json``; the tables and the figure are made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earnest.errors import EarnestError
from earnest.runs.comparison import standard_error

FILE = "results.json"
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's 97.5 % quantile by degrees of freedom."""
RATES = ("solved", "exploited", "attempted", "exploited_of_attempted")
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A mean and the half-width of its 95 % interval: over seeds, or for one seed over its held-out prompts."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.half is None else f" ± {self.half:.2f}")


def gather(folder: Path, names: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Compact records of the jobs that are there, and the names of those that are not."""
    found, missing = [], []
    for name in names:
        path = folder / "jobs" / f"{name}.json"
        if path.exists():
            found.append(_compact(json.loads(path.read_text())))
        else:
            missing.append(name)
    return {"config": dict(config), "missing": missing, "jobs": found}


def read(path: Path) -> dict[str, Any]:
    """A ``results.json``, or the folder that has one."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise EarnestError(f"there are no results at {path}; `earnest run hacking` makes them.")
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def _compact(job: dict[str, Any]) -> dict[str, Any]:
    series = {name: [_point(p) for p in points] for name, points in job["series"].items()}
    return {k: job[k] for k in ("job", "arm", "seed", "without", "pool", "directions")} | {
        "series": series,
        "guard": _guard(job["log"]),
        "seconds": job.get("seconds"),
    }


def _point(p: Mapping[str, Any]) -> dict[str, Any]:
    holes = sorted(set(p["holes"]))
    by_hole = {
        h: _mean([x for x, hole in zip(p["exploited_means"], p["holes"], strict=True) if hole == h]) for h in holes
    }
    spread = {f"{rate}_se": standard_error(p[f"{rate}_means"]) for rate in ("solved", "exploited")}
    return {"step": p["step"], **{r: p[r] for r in RATES}, **spread, "by_hole": by_hole}


def _guard(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the updates of every number that a guard reported."""
    keys = sorted({k for line in log for k in line if k.rpartition("/")[2] in _REPORTED})
    return {k: _mean([line[k] for line in log if k in line]) for k in keys}


_REPORTED = ("removed", "leak_gradient", "leak_update", "overlap", "heading", "adopted")


# --- arms -------------------------------------------------------------------------------------------------------------


def arm_series(results: Mapping[str, Any], arm: str, *, pool: bool = False) -> dict[int, list[Point]]:
    """Seed → the arm's evaluations, with directions from all holes."""
    return {
        job["seed"]: job["series"][arm]
        for job in results["jobs"]
        if arm in job["series"] and not job["without"] and job["pool"] == pool
    }


def left_out(results: Mapping[str, Any], arm: str, hole: str) -> dict[int, list[Point]]:
    """The same with directions made without ``hole``; an arm without true directions has no such version."""
    name = f"{arm}-without-{hole}"
    found = {j["seed"]: j["series"][name] for j in results["jobs"] if name in j["series"]}
    found |= {j["seed"]: j["series"][arm] for j in results["jobs"] if j["without"] == hole and arm in j["series"]}
    return found


def leaks(results: Mapping[str, Any], arm: str) -> dict[str, Estimate | None]:
    """Share of the unwanted component in what enters the optimizer, and in the step that the deployed policy takes.

    Without a guard the second is the share that Route would have quarantined.
    """
    out: dict[str, Estimate | None] = {}
    for level in ("gradient", "update"):
        values = []
        for job in results["jobs"]:
            if job["without"] or job["pool"] or arm not in job["series"]:
                continue
            prefix = "" if job["arm"] == arm else f"{arm}/"
            key = f"{prefix}leak_{level}"
            if arm == "none":
                key = "route/removed" if level == "update" else "route/leak_gradient"
            if key in job["guard"]:
                values.append(job["guard"][key])
        out[level] = over_seeds(values) if values else None
    return out


def refreshes(results: Mapping[str, Any], arm: str) -> dict[str, Estimate] | None:
    """Later extractions of an arm's directions: overlap and heading, and the share that was adopted."""
    found: dict[str, list[float]] = {"overlap": [], "heading": [], "adopted": []}
    for job in results["jobs"]:
        if job["without"] or job["pool"] or arm not in job["series"]:
            continue
        prefix = "" if job["arm"] == arm else f"{arm}/"
        for what, values in found.items():
            if prefix + what in job["guard"]:
                values.append(job["guard"][prefix + what])
    return {what: over_seeds(values) for what, values in found.items()} if found["adopted"] else None


def over_seeds(values: Sequence[float], alone: float | None = None) -> Estimate:
    """Mean and interval; ``alone`` is the standard error for a single seed."""
    n = len(values)
    if n == 1:
        return Estimate(values[0], None if alone is None else 1.96 * alone)
    se = standard_error(values)
    assert se is not None
    return Estimate(_mean(values), T95.get(n - 1, 1.96) * se)


def at_end(series: Mapping[int, Sequence[Point]], rate: str) -> Estimate:
    last = [points[-1] for points in series.values()]
    return over_seeds([p[rate] for p in last], last[0].get(f"{rate}_se"))


COMPARED = ("none", "erase", "route")
"""The arms that set the matched level. An arm that learns less of everything would lower it for all."""


def matched_level(by_arm: Mapping[str, Mapping[int, Sequence[Point]]], seed: int) -> float | None:
    """The highest solve rate that each of the compared arms of this seed reaches after training began."""
    there = [by_arm[arm][seed] for arm in COMPARED if seed in by_arm.get(arm, ())]
    return min((max(p["solved"] for p in points if p["step"] > 0) for points in there), default=None)


def at_level(points: Sequence[Point], level: float) -> Point | None:
    """The first evaluation after training began at which the solve rate is at least ``level``, if there is one."""
    return next((p for p in points if p["step"] > 0 and p["solved"] >= level), None)


@dataclass(frozen=True)
class Matched:
    """The exploited rate when an arm first reaches the matched solve rate, over the seeds that reach it."""

    rate: Estimate | None
    step: float | None
    reached: int
    seeds: int

    def __str__(self) -> str:
        if self.rate is None:
            return "not reached"
        return f"{self.rate}" + ("" if self.reached == self.seeds else f" ({self.reached} of {self.seeds} seeds)")


def matched(by_arm: Mapping[str, Mapping[int, Sequence[Point]]], arm: str) -> Matched:
    levels = {seed: matched_level(by_arm, seed) for seed in by_arm[arm]}
    found = [at_level(s, level) for seed, s in by_arm[arm].items() if (level := levels[seed]) is not None]
    points = [p for p in found if p is not None]
    if not points:
        return Matched(None, None, 0, len(by_arm[arm]))
    rate = over_seeds([p["exploited"] for p in points], points[0].get("exploited_se"))
    return Matched(rate, _mean([p["step"] for p in points]), len(points), len(by_arm[arm]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

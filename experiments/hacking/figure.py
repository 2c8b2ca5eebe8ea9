"""The figure: exploited and solved by step, the two against each other at the end, and at a matched solve rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.hacking.results import Point, arm_series, matched, over_seeds
from experiments.hacking.tables import arms_of

COLOURS = {"none": "#444444", "erase": "#0072b2", "route": "#d55e00"}
CONTROL_COLOURS = {"random": "#56b4e9", "shuffled": "#009e73", "clean": "#cc79a7", "noise": "#e69f00"}


def colour(arm: str) -> str:
    return COLOURS.get(arm) or CONTROL_COLOURS.get(arm.partition(":")[2], "#888888")


def write_figure(results: Mapping[str, Any], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    arms = [arm for arm in arms_of(results) if arm_series(results, arm)]
    figure, axes = plt.subplots(1, 4, figsize=(17, 4.8), dpi=110, layout="constrained")
    by_arm = {arm: arm_series(results, arm) for arm in arms}
    for arm in arms:
        series = arm_series(results, arm)
        main = arm in COLOURS
        style = "-" if main else ("--" if arm.startswith("erase") else ":")
        label = f"{arm} (ablated)" if arm.startswith("route") else arm
        for axis, rate in zip(axes, ("exploited", "solved"), strict=False):
            steps, mean, half = curve(series, rate)
            axis.plot(
                steps,
                mean,
                style,
                color=colour(arm),
                linewidth=2.2 if main else 1.1,
                alpha=1 if main else 0.75,
                label=label,
            )
            if main:
                low, high = ([m + s * h for m, h in zip(mean, half, strict=True)] for s in (-1, 1))
                axis.fill_between(steps, low, high, color=colour(arm), alpha=0.13, linewidth=0)
        ends = [points[-1] for points in series.values()]
        marker = "o" if arm.startswith("route") or arm == "none" else "s"
        x, y = (
            over_seeds([p["solved"] for p in ends], ends[0].get("solved_se")),
            over_seeds([p["exploited"] for p in ends], ends[0].get("exploited_se")),
        )
        axes[2].errorbar(
            x.mean, y.mean, xerr=x.half, yerr=y.half, fmt=marker, color=colour(arm), elinewidth=0.8 if main else 0.4,
            markersize=9 if main else 5, alpha=1 if main else 0.75,
            markerfacecolor=colour(arm) if marker == "o" else "white",
        )  # fmt: skip
        level = matched(by_arm, arm)
        if level.rate is not None:
            axes[3].errorbar(
                level.rate.mean, arms.index(arm), xerr=level.rate.half, fmt=marker, color=colour(arm), capsize=2,
                elinewidth=1.6 if main else 0.8, markersize=8 if main else 5,
                markerfacecolor=colour(arm) if level.reached == level.seeds else "white",
            )  # fmt: skip
        else:
            axes[3].text(0.01, arms.index(arm), "not reached", color=colour(arm), va="center", fontsize=8)
        if main:
            axes[2].annotate(label, (x.mean, y.mean), textcoords="offset points", xytext=(8, 8), color=colour(arm))
    titles = (
        "exploited, held-out",
        "solved by the oracle, held-out",
        "at the end",
        "exploited at the matched solve rate",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:2]:
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    axes[2].set_xlabel("solved")
    axes[2].set_ylabel("exploited")
    axes[2].set_ylim(bottom=0)
    axes[3].set_yticks(range(len(arms)), arms, fontsize=8)
    axes[3].set_ylim(len(arms) - 0.5, -0.5)
    axes[3].set_xlim(0, 0.7)  # with two seeds the interval is wider than the axis
    axes[3].set_xlabel("exploited (hollow: not every seed gets there)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(arms)), frameon=False, fontsize=9)
    figure.savefig(path)
    plt.close(figure)
    return path


def curve(series: Mapping[int, Sequence[Point]], rate: str) -> tuple[list[int], list[float], list[float]]:
    """Steps, means over the seeds, half-widths of the interval."""
    rows = list(zip(*series.values(), strict=True))
    found = [over_seeds([p[rate] for p in row], row[0].get(f"{rate}_se")) for row in rows]
    return [row[0]["step"] for row in rows], [e.mean for e in found], [e.half or 0.0 for e in found]

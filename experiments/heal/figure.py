"""The figure: trait and coherence of every loop, round by round."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

COLOURS = {"mean": "#c0392b", "rmse": "#1f6fb2", "p95": "#2e8b57", "max": "#8e5ea2"}
PUBLISHED = {"mean": (0.99, 0.62), "rmse": (0.997, 0.997)}
"""Coherence of gemma-3-4b in the first round and by round 7, as published."""
TITLES = {"same": "the same τ", "calibrated": "τ calibrated to equal firing", "given": "the loop"}


def draw(results: dict[str, Any], path: Path) -> Path:
    """Above: trait against incoherence (log axis), round by round. Below: coherence over rounds, against the
    published one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [t for t in TITLES if any(arm["taus"] == t for arm in results["arms"])]
    figure, axes = plt.subplots(
        2, len(groups), figsize=(5.6 * len(groups), 8.4), squeeze=False, sharex="row", sharey="row"
    )
    for column, group in enumerate(groups):
        arms = [arm for arm in results["arms"] if arm["taus"] == group]
        _trade(axes[0][column], results, arms)
        _rounds(axes[1][column], arms, published=len(groups) > 1)
        axes[0][column].set_title(TITLES[group])
    axes[0][0].set_ylabel("trait (1 is the high pole)")
    axes[1][0].set_ylabel("coherence (the least of mass, fluency, sense)")
    handles = {
        label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="lower center", ncols=3, fontsize=8, frameon=False)
    counts = sorted({len(arm["runs"]) for arm in results["arms"]})
    spread = (
        "" if counts[-1] == 1 else f", mean of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"
    )
    figure.suptitle(f"steer and heal: {results['model']}, {results['task']}{spread}", fontsize=11)
    figure.tight_layout(rect=(0, 0.022 * (2 + len(handles) // 3), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _path(arm: dict[str, Any], key: str, who: str = "healed") -> list[float]:
    """The mean over seeds, round by round; a loop that stopped keeps its last value."""
    runs = [run["rounds"] for run in arm["runs"] if run["rounds"]]
    return [fmean(run[min(i, len(run) - 1)][who][key] for run in runs) for i in range(max(map(len, runs)))]


def _style(arm: dict[str, Any]) -> dict[str, Any]:
    base = arm["reference"] == "base"
    return {
        "color": COLOURS[arm["over"]],
        "linestyle": "--" if base else "-",
        "marker": "s" if base else "o",
        "markersize": 3.5,
        "linewidth": 1.3,
        "label": f"{arm['over']} against {arm['reference']}",
    }


def _incoherence(coherence: float) -> float:
    return max(1 - coherence, 1e-3)


def _trade(ax: Any, results: dict[str, Any], arms: list[dict[str, Any]]) -> None:
    base, prompted = results["base"], results["prompted"]
    for arm in arms:
        coherence = [base["coherence"], *_path(arm, "coherence")]
        ax.plot([_incoherence(m) for m in coherence], [base["trait"], *_path(arm, "trait")], **_style(arm))
    ax.plot(_incoherence(base["coherence"]), base["trait"], "k^", markersize=7, label="base")
    ax.plot(_incoherence(prompted["coherence"]), prompted["trait"], "k*", markersize=11, label="system prompt")
    ax.set_xscale("log")
    ax.set_xlabel("incoherence: 1 − coherence (log)")
    ax.grid(alpha=0.25, which="both")


def _rounds(ax: Any, arms: list[dict[str, Any]], *, published: bool) -> None:
    for arm in arms:
        coherence = _path(arm, "coherence")
        numbers = range(1, len(coherence) + 1)
        ax.plot(numbers, coherence, **_style(arm))
        if not published:  # one loop: what its coherence is the least of, and what steering alone would have
            for key, style in (("mass", ":"), ("fluency", "-."), ("sense", "--")):
                ax.plot(numbers, _path(arm, key), color="#888", linestyle=style, linewidth=1, label=key)
            ax.plot(numbers, _path(arm, "coherence", "steered"), color="#c77", marker="x", label="steered, not healed")
    if published:
        for over, ends in PUBLISHED.items():
            label = f"published, gemma-3-4b: {over}"
            ax.plot([1, 7], ends, color=COLOURS[over], linestyle=":", linewidth=2, alpha=0.6, label=label)
    ax.set_xlabel("round")
    ax.set_ylim(0, 1.03)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)

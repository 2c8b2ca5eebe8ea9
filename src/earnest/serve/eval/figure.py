"""The figure: margin, compliance, capability and collapse, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from earnest.errors import MissingExtra
from earnest.serve.eval.loop import Round

COLOURS = ("#0b6e99", "#b8461f", "#5a7d1e", "#7b4f9d", "#8a6d00", "#a1325e")


def draw(rounds: Sequence[Round], path: Path) -> Path:
    """Write a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "plots", "the figure of earnest eval") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first = {r.preference: r.margin for r in rounds if r.round == 0}
    panels = (
        ("margin gained (nats per pair)", lambda r: r.margin - first[r.preference], None),
        ("compliance", lambda r: r.compliance, (-0.04, 1.04)),
        ("capability", lambda r: r.capability, (-0.04, 1.04)),
        ("entropy ratio", lambda r: r.collapse.get("entropy_ratio", 1.0), None),
    )
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), constrained_layout=True)
    names = list(dict.fromkeys(r.preference for r in rounds))
    for axis, (title, value, limits) in zip(axes, panels, strict=True):
        for name, colour in zip(names, COLOURS * len(names), strict=False):
            own = [r for r in rounds if r.preference == name]
            axis.plot([r.round for r in own], [value(r) for r in own], "o-", color=colour, label=name, ms=4, lw=1.6)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round of feedback", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if limits:
            axis.set_ylim(limits)
    axes[-1].axhline(1.0, color="#888", lw=0.8, ls="--")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path

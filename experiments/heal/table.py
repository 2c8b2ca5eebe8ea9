"""The results as markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

COLUMNS = (
    "barrier", "reference", "τ", "fires", "trait, best", "trait, end", "mass, end", "sense, end", "coherence, round 1",
    "coherence, round 2", "coherence, least", "coherence, end", "drift", "rounds",
)  # fmt: skip


def tables(results: dict[str, Any]) -> str:
    """The two baselines; then the arms, those of one choice of τ together. ± is the standard deviation over seeds.

    "coherence, least" is the lowest coherence of any round, which need not be the last."""
    return "\n".join([*_baselines(results), "", *_arms(results)]) + "\n"


def _baselines(results: dict[str, Any]) -> list[str]:
    lines = ["| without training | trait | mass | fluency | sense | score |", "|" + " --- |" * 6]
    for name, key in (("base", "base"), (f"prompted “{results['prompted']['system']}”", "prompted")):
        found = results[key]
        numbers = [f"{found[what]:.3f}" for what in ("trait", "mass", "fluency", "sense", "score")]
        lines.append(f"| {name} | " + " | ".join(numbers) + " |")
    return lines


def _arms(results: dict[str, Any]) -> list[str]:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for arm in results["arms"]:
        runs = [run for run in arm["runs"] if run["rounds"]]
        last = [run["rounds"][-1] for run in runs]
        cells = [
            arm["over"],
            arm["reference"],
            f"{arm['tau']:.3g}{' (calibrated)' if arm['taus'] == 'calibrated' else ''}",
            f"{fmean(r['heal']['firing'] for run in runs for r in run['rounds']):.0%}",
            _spread([max(r["healed"]["trait"] for r in run["rounds"]) for run in runs], 2),
            _spread([r["healed"]["trait"] for r in last], 2),
            _spread([r["healed"]["mass"] for r in last], 3),
            _spread([r["healed"]["sense"] for r in last], 2),
            _spread([run["rounds"][0]["healed"]["coherence"] for run in runs], 2),
            _spread([run["rounds"][1]["healed"]["coherence"] for run in runs if len(run["rounds"]) > 1], 2),
            _spread([min(r["healed"]["coherence"] for r in run["rounds"]) for run in runs], 2),
            _spread([r["healed"]["coherence"] for r in last], 2),
            _spread([r["vector"]["cosine_first"] for r in last], 2),
            _rounds(runs),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "none"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def _rounds(runs: Sequence[dict[str, Any]]) -> str:
    """Finished rounds of each seed; a * where a loop stopped early."""
    return ", ".join(f"{len(run['rounds'])}{'*' if run['stopped'] else ''}" for run in runs)

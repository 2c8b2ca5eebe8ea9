"""Two held-out measurements on the same prompts or rows, and the standard errors of both and of the gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from earnest.report.record import Measure


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two measurements on the same prompts. Standard errors are None if there is only one prompt."""

    before: float
    after: float
    before_se: float | None
    after_se: float | None
    gain: float
    gain_se: float | None
    prompts: int
    samples: int
    measure: Measure = "reward"
    perplexity: tuple[float, float] | None = None
    margin: tuple[float, float] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name = f"held-out {self.measure}"
        before, after = with_error(self.before, self.before_se), with_error(self.after, self.after_se)
        yield f"{name:<16} {before} → [bold green]{after}[/]"
        if self.measure != "reward":
            if self.perplexity is not None:
                yield f"perplexity       {self.perplexity[0]:.3f} → {self.perplexity[1]:.3f}"
            if self.margin is not None:
                yield f"margin           {self.margin[0]:.3f} → {self.margin[1]:.3f}  [dim](nats per token)[/]"
            size = _over(self.prompts, "row", "rows")
            yield f"change           {with_error(self.gain, self.gain_se, '+')}  [dim]({size})[/]"
            return
        size = f"{_over(self.prompts, 'prompt', 'prompts')}, {self.samples} completions"
        yield f"gain             {with_error(self.gain, self.gain_se, '+')}  [dim]({size})[/]"


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``Comparison`` from two evaluation lines of metrics.jsonl."""
    gained, gained_se = gain(before["means"], after["means"])
    measure = after.get("measure", "reward")

    def both(name: str) -> tuple[float, float] | None:
        found = (before["metrics"].get(name), after["metrics"].get(name))
        return None if None in found else found

    return {
        "measure": measure,
        "perplexity": both("heldout/perplexity") if measure == "loss" else None,
        "margin": both("pairs/margin") if measure == "accuracy" else None,
        "before": before[measure],
        "after": after[measure],
        "before_se": before["se"],
        "after_se": after["se"],
        "gain": gained,
        "gain_se": gained_se,
        "prompts": after["prompts"],
        "samples": after["n"],
    }


def _over(count: int, one: str, many: str) -> str:
    """What the standard errors are over; a single row or prompt has none."""
    return f"standard errors over {count} {many}" if count != 1 else f"one {one}, so no standard error: hold out more"


def with_error(value: float, se: float | None, sign: str = "") -> str:
    """A number with its standard error."""
    return f"{value:{sign}.3f}" + ("" if se is None else f" ± {se:.3f}")


def gain(before: Sequence[float], after: Sequence[float]) -> tuple[float, float | None]:
    """(gain, its standard error), from the difference of each prompt's means."""
    differences = [a - b for b, a in zip(before, after, strict=True)]
    return sum(differences) / len(differences), standard_error(differences)


def standard_error(values: Sequence[float]) -> float | None:
    """sd/√n, with the sd's divisor n - 1; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)

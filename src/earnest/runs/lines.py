"""A step as a line of metrics.jsonl."""

from __future__ import annotations

from typing import Any

from earnest.engines import StepReport
from earnest.objectives import Objective
from earnest.runs.collect import Collected, reward_summary
from earnest.signals import Batch


def step_line(step: int, version: int, collected: Collected, seconds: dict[str, float]) -> dict[str, Any]:
    """What is known of a step before it trains."""
    line: dict[str, Any] = {"kind": "step", "step": step, "version": version}
    if collected.attempts:
        line["reward"] = reward_summary(collected.attempts)
    return line | {"metrics": dict(collected.metrics), "seconds": seconds}


def trained(line: dict[str, Any], report: StepReport, lr: float) -> dict[str, Any]:
    """The line of a step that updated; a term that is alone has the whole gradient, if there is one."""
    alone = len(report.terms) == 1 and report.update.gradient_norm > 0
    terms = {
        label: {
            "kind": term.kind,
            "weight": term.weight,
            "loss": term.value,
            "share": 1.0 if alone else term.share,
            "ran": term.ran,
            "metrics": dict(term.metrics),
        }
        for label, term in report.terms.items()
    }
    more = {"clip_factor": report.update.clip_factor}
    more |= {f"guard/{k}": v for k, v in report.update.guard.items()}
    more |= {f"outer/{k}": v for k, v in report.update.outer.items()}
    return line | {
        "loss": report.loss,
        "terms": terms,
        "skipped": list(report.skipped),
        "idle": dict(report.idle),
        "grad_norm": report.update.gradient_norm,
        "update_norm": report.update.update_norm,
        "lr": lr,
        "passes": report.passes,
        "micro_batches": report.micro_batches,
        "metrics": line["metrics"] | more,
    }


def untrained(line: dict[str, Any], objective: Objective, batch: Batch) -> dict[str, Any]:
    """The line of a step on whose batch every live term was lawfully idle: nothing was updated, and it says why."""
    nothing: dict[str, Any] = {"loss": None, "terms": {}, "grad_norm": None, "update_norm": None, "lr": None}
    return line | nothing | {"skipped": list(objective.skipped), "idle": objective.idle(batch)}

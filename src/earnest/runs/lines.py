"""A step as a line of metrics.jsonl."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from earnest.engines import StepReport
from earnest.engines.base import Engine
from earnest.objectives import Objective
from earnest.rollouts import Attempt, Rollouts, reward_summary


def step_line(
    step: int,
    engine: Engine,
    objective: Objective,
    collected: Rollouts,
    seconds: dict[str, float],
    done: StepReport | Mapping[str, str],
) -> dict[str, Any]:
    """The line of a step: rewards, sampling metrics, seconds, and the report of its last update. ``done`` of a step
    without an update is the reason of each term, because no live term had anything to compute."""
    line: dict[str, Any] = {"kind": "step", "step": step, "version": engine.version}
    if collected.attempts:
        line["reward"] = reward_summary(collected.attempts)
    line |= {"metrics": collected.metrics | _sampled(collected.attempts), "seconds": seconds}
    if "entropy" in line["metrics"]:
        line["metrics"]["entropy_of_random_tokens"] = math.log(len(engine.policy.tokenizer))
    if isinstance(done, StepReport):
        return _trained(line, done, objective, engine.learning_rate)
    nothing: dict[str, Any] = {"loss": None, "terms": {}, "grad_norm": None, "update_norm": None, "lr": None}
    reason = "no term had anything to do (" + "; ".join(f"{label}: {why}" for label, why in done.items()) + ")"
    return line | nothing | {"skipped": list(objective.skipped), "idle": dict(done), "learned_nothing": reason}


def _sampled(attempts: Sequence[Attempt]) -> dict[str, float]:
    """``entropy``: minus the mean log-prob of the sampled tokens, an estimate of the sampling distribution's entropy in
    nats per token. ``groups_identical``: the share of prompts whose completions are all the same, where a
    prompt has several."""
    if not attempts:
        return {}
    logprobs = [lp for a in attempts for lp in a.rollout.logprobs]
    texts: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for a in attempts:
        texts[a.rollout.prompt_index].add(tuple(a.rollout.tokens))
    found: dict[str, float] = {}
    if len(attempts) > len(texts):
        found["groups_identical"] = sum(len(t) == 1 for t in texts.values()) / len(texts)
    return found | ({"entropy": -sum(logprobs) / len(logprobs)} if logprobs else {})


def _trained(line: dict[str, Any], report: StepReport, objective: Objective, lr: float) -> dict[str, Any]:
    """The line of a step that updated. A single term has share 1 of the gradient, unless the gradient is zero.
    ``surrogate`` terms read advantages: the gradient of their loss has a meaning, its value has none."""
    alone = len(report.terms) == 1 and report.update.gradient_norm > 0
    surrogates = {w.term.label for w in objective.live() if "advantages" in w.term.signals()}
    terms = {
        label: {
            "kind": term.kind,
            "weight": term.weight,
            "loss": term.value,
            "surrogate": label in surrogates,
            "share": 1.0 if alone else term.share,
            "ran": term.ran,
            "metrics": dict(term.metrics),
        }
        for label, term in report.terms.items()
    }
    more: dict[str, float] = {
        "clip_factor": report.update.clip_factor,
        "computed_tokens": report.computed_tokens,
        "padded_tokens": report.padded_tokens,
    }
    more |= {f"guard/{k}": v for k, v in report.update.guard.items()}
    more |= {f"outer/{k}": v for k, v in report.update.outer.items()}
    return line | {
        "loss": report.loss,
        "terms": terms,
        "skipped": list(report.skipped),
        "idle": dict(report.idle),
        "learned_nothing": report.learned_nothing,
        "grad_norm": report.update.gradient_norm,
        "update_norm": report.update.update_norm,
        "lr": lr,
        "passes": report.passes,
        "layout": report.layout,
        "micro_batches": report.micro_batches,
        "tokens": report.tokens,
        "metrics": line["metrics"] | more,
    }

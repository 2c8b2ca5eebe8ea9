"""Facts about the metrics of earnest's own terms: their ranges, which of them may stay constant, and their values when
the policy is the one that sampled the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from earnest.objectives.base import Value, Weighted
from earnest.objectives.metrics import Mean
from earnest.objectives.policy_gradient import Clipped
from earnest_audit.facts import Metric

SHARES = ("clip_low", "clip_high", "clip_dual", "advantage_zero", "accuracy", "is_cut", "coverage", "entropy_selected",
          "gate", "capped", "beyond", "prompts_with_weight", "taid_t")  # fmt: skip
POSITIVE = ("ratio", "ratio_max", "is_weight", "is_weight_max", "behaviour_kl", "k2", "k3", "gap_max", "nll", "entropy",
            "divergence", "divergence_max", "aggregate", "sigma", "sigma_max", "tokens", "positions", "strength",
            "dropped_tokens", "rows_left_out")  # fmt: skip
# Metrics that change with any change of the policy. The others are counts, settings, or shares that may stay 0 or 1.
MOVING = ("ratio", "ratio_max", "behaviour_kl", "k1", "k2", "k3", "gap_max", "nll", "entropy", "divergence", "sigma")
# Where behaviour = proximal = current policy.
NEUTRAL = {"ratio": 1.0, "ratio_max": 1.0, "behaviour_kl": 0.0, "gate": 1.0, "is_weight": 1.0, "is_weight_max": 1.0}
CLIPS = ("clip_low", "clip_high", "clip_dual")
NARROW = 0.01  # a clip as tight as a log-prob's rounding in 16 bits may act at ratio 1


def named(live: Sequence[Weighted], whole: bool) -> dict[str, str]:
    """The prefix of every term's metrics. One term that reads every token has none: its metrics are averages over the
    whole batch and can be recomputed under their usual names."""
    return {w.term.label: "" if whole and len(live) == 1 else f"{w.term.label}." for w in live}


def read(values: Mapping[str, Value], prefixes: Mapping[str, str]) -> dict[str, float]:
    """Every metric of every term that had tokens to average over."""
    return {
        prefixes[label] + name: metric.value
        for label, value in values.items()
        for name, metric in value.metrics.items()
        if not (isinstance(metric, Mean) and metric.count == 0)
    }


def facts(live: Sequence[Weighted], values: Mapping[str, Value], prefixes: Mapping[str, str]) -> dict[str, Metric]:
    """The range of each known metric, whether it has to move, and its value for an unchanged policy."""
    found: dict[str, Metric] = {}
    for w in live:
        wide = isinstance(w.term, Clipped) and min(w.term.clip, w.term.ceiling - 1) >= NARROW
        for name in values[w.term.label].metrics if w.term.label in values else ():
            if name.startswith("divergence") and getattr(w.term, "tail", None) == "unnormalised":
                continue  # a sum over K tokens of an unnormalised KL may be below 0
            if name in (*SHARES, *POSITIVE, *MOVING):
                low, high = 0.0 if name in (*SHARES, *POSITIVE) else None, 1.0 if name in SHARES else None
                neutral = 0.0 if name in CLIPS and wide else NEUTRAL.get(name)
                found[prefixes[w.term.label] + name] = Metric(low, high, name in MOVING, neutral)
    return found

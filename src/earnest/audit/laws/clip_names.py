"""What a step's settings are, by their names: clips of the ratio, and the weights of other terms."""

from __future__ import annotations

from typing import Any

from earnest.audit.step import Raises, Step

# A clip's settings by their usual names, and by nothing less: smooth_eps, huber_delta, reward_clip and
# cliprange_value are other things.
LOW = (
    "clip",
    "clip_low",
    "eps",
    "epsilon",
    "epsilon_low",
    "eps_low",
    "clip_eps",
    "clip_epsilon",
    "clip_range",
    "clip_range_low",
    "cliprange",
    "cliprange_low",
    "eps_clip",
    "eps_clip_low",
    "clip_ratio",
    "clip_ratio_low",
)
HIGH = (
    "clip_high",
    "epsilon_high",
    "eps_high",
    "clip_range_high",
    "cliprange_high",
    "eps_clip_high",
    "clip_ratio_high",
)
BEYOND = ("delta", "dual_clip", "clip_dual", "clip_ratio_c", "importance_clip")  # other bounds that are inert at 1


def last(knob: str) -> str:
    """The setting's own name: ``grpo.clip`` is a clip."""
    return knob.lower().rsplit(".", 1)[-1]


def clips(step: Step) -> list[str]:
    return [k for k, v in step.knobs.items() if isinstance(v, float) and last(k) in LOW + HIGH + BEYOND]


def quiet_knobs(step: Step) -> dict[str, Any]:
    """Every declared term's weight at 0, so that the policy gradient stands alone."""
    knobs = [t.knob if isinstance(t, Raises) else t for t in step.terms.values()]
    return dict.fromkeys([*knobs, *step.switches], 0.0)

"""What a step's settings are, by their names: clips of the ratio, target margins, smoothings, mixtures."""

from __future__ import annotations

from earnest.audit.step import Step

# A clip's settings by their usual names, and by nothing less: smooth_eps, huber_delta, reward_clip and
# cliprange_value are other things.
LOW = ("clip", "clip_low", "eps", "epsilon", "epsilon_low", "eps_low", "clip_eps", "clip_epsilon", "clip_range",
       "clip_range_low", "cliprange", "cliprange_low", "eps_clip", "eps_clip_low", "clip_ratio",
       "clip_ratio_low")  # fmt: skip
HIGH = ("clip_high", "epsilon_high", "eps_high", "clip_range_high", "cliprange_high", "eps_clip_high",
        "clip_ratio_high")  # fmt: skip
BEYOND = ("delta", "dual_clip", "clip_dual", "clip_ratio_c", "importance_clip")  # other bounds that are inert at 1
TARGETS = ("gamma", "simpo_gamma", "gamma_beta_ratio", "margin", "target_margin", "offset")
SMOOTHING = ("label_smoothing", "label_smoothing_factor", "smoothing")
MIXTURES = ("alpha", "beta", "jsd_beta", "jsd_alpha")


def last(knob: str) -> str:
    """The setting's own name: ``grpo.clip`` is a clip."""
    return knob.lower().rsplit(".", 1)[-1]


def clips(step: Step) -> list[str]:
    return [k for k, v in step.knobs.items() if isinstance(v, float) and last(k) in LOW + HIGH + BEYOND]

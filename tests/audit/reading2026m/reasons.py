"""Why the first audit of the thirteenth reading missed a defect or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "kk/d10_apo_down_half_transformed": "one of the two log-ratios is not transformed; both train pairs the same way, "
    "and only the definition shows the difference",
    "ll/d05_cosine_handoff_overshoot": "the rate is 2.5 % above the declared peak, and up to a tenth was allowed",
}
ALARMS = {
    "ll/d01_distill_padding_positions": "law SE did not check a term by itself whose weight has a value that leaves "
    "the divergence alone, and the likelihood has another count than the divergence",
    "ll/r09_optimizer_step_inside_backward": "SE-UPDATE also compared parameters that another optimizer owns, and "
    "where one steps inside the backward the others have no gradient",
}

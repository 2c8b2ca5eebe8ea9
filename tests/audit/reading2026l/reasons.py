"""Why the first audit of the twelfth reading missed a defect or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "hh/d01_prefix_length_mask": "the declared conversations do not show it: the template's length differs between the "
    "whole and its beginning only for other messages",
    "jj/d05_aux_prob_topk_only": "the balancing term takes other probabilities; its gradient still balances, and only "
    "its definition shows the difference",
    "jj/d06_mtp_roll_segments": "the targets of the extra depths cross documents, which are declared for the main loss "
    "alone; law SE warns of this term",
    "jj/d09_padded_actions_mean": "a mean over all places, padded ones included, is a mean as well: the loss is too "
    "small by a factor, and more padding is not tried without ids",
}
ALARMS = {
    "hh/r12_shared_prefix": "law CV counts outputs that have a gradient, and the prompt's last one predicts the first "
    "token of several answers",
}

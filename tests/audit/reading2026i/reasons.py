"""Why the first audit of the ninth reading missed a defect or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "s/d08_mtp_mask_shifted_twice": "one mask serves the main loss, which is right, and the extra head's, where it is "
    "one token early; CV looks at the whole loss",
    "s/d09_simpo_length_counts_ignored_eos": "a mean over another count than its tokens is another length penalty; "
    "only a second path shows it",
    "v/d01_zero2_manual_accumulation": "the first micro-batch of the cut had no trained token, so it showed nothing",
    "v/d02_iql_twin_target": "the loss reads a trained network in place of a frozen copy, and no declaration names "
    "which networks are read",
}
ALARMS = {
    "v/r15_rising_teacher_momentum": "SCHEDULE wanted a held end to be reached exactly; the last entry of a table over "
    "i / n is just above it",
}

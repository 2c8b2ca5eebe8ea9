"""Why the first audit of the sixth reading accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS = {
    "i/r27_skewed_reverse_kl": "the alarm is true: where the teacher is 0 and the student's probability underflows, "
    "the loss is 0·∞ = NaN in float32",
    "k/r27_on_policy_distillation": "the weight of the whole loss was declared as that of a term, and law PG-ONPOLICY "
    "judged what is left at weight 0: nothing",
    "l/r31_unfreeze_groups": "one warm-up was declared for groups with three; since then it may be one per group",
    "l/r36_best_fit": "DATA compared a declared column with the packed batch in place of the unpacked document",
}

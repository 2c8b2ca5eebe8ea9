"""Why the first audit of the eleventh reading missed a defect or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "dd/d02_padding_free_single_token_boundary": "one packed row whose documents are compared in groups: no "
    "declaration states which documents belong together, so no law cuts the row",
    "dd/d04_ipo_packed_row_length": "as dd/d02: pairs of documents in one packed row; the rest is a factor per pair, "
    "which only a second path shows",
    "dd/d10_teacher_logp_one_position_late": "the teacher's scores have another width than the tokens, so it is "
    "not known which score belongs to which token",
    "ee/d09_fake_quant_clamp": "the step rounds its weights at ties, so one unit in the last place moves the gradient "
    "by 0.06, and gradients count as equal up to 0.5 (the verdict notes it since)",
    "ff/d02_muon_decay_lost": "no subject has the settings of an optimizer",
    "ff/d08_mtp_through_image": "the fix was accused by the same row; no declaration states which tokens the depths of "
    "a multi-token prediction leave out",
}
ALARMS = {
    "ff/d08_mtp_through_image": "law SE: the term is a sum of means over counts of its own, which no role declares; "
    "the row warns since, where no signal is declared",
}

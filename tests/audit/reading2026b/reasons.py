"""Why the first audit of the second reading missed a defect, or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "c/d01_truncated_flag_dropped": "Collator has no declaration of what a column is made from: the lost flag is lost "
    "in every example alike",
    "c/d03_generation_prompt_supervised": "ChatTemplate does not ask that the tokens of the prompt are unsupervised",
    "c/d12_decay_horizon_minus_warmup_twice": "Schedule looks for an end before the run's end only where the final "
    "rate is 0, and this one is a floor",
    "d/d02_observation_kl_in_returns": "no subject takes returns with a KL per token and without values",
    "d/d05_single_token_boundary_lost": "the sequences are negatives of each other, so no documents were declared, and "
    "one row leaves nothing to split",
    "d/d06_mtp_aux_denominator": "only the size of the balance term is wrong, by a ratio of two counts that doubled "
    "rows keep; rows interact, so parts are not compared",
    "d/d19_skipped_pairs_in_denominator": "a mean over all pairs is a mean too: doubled rows and parts with free "
    "weights hold for both divisors",
    "d/d20_leave_one_out_std_cancels": "the one different answer is tried among zeros only, whose squares do not round",
}
ALARMS = {
    "c/d05_packed_roll_unpadded_bounds": "the declaration: the fix does not read the true lengths (attention); law IG: "
    "shifted labels leave no context without a loss inside a document; law CV: the auxiliary mean of no target is NaN",
    "d/d04_recurrent_state_crosses_documents": "law IG takes the last token of a document, which has no label after a "
    "shift, for context of the next document",
    "d/d05_single_token_boundary_lost": "the declaration: the reader's model has a head that this loss does not use, "
    "and may_idle was not declared",
    "d/d08_gathered_logits_vocab_parallel": "the declaration: tp is stated to change nothing, and the code needs a tp "
    "that divides the vocabulary (20 by 3 was tried)",
    "d/d19_skipped_pairs_in_denominator": "the declaration: the reader's model has a head that this loss does not use, "
    "and may_idle was not declared",
    "d/r04_shared_prefix_tree": "law SE doubles the batch, and this code takes exactly one row (it counts the prompt "
    "over all rows); no declaration states that",
    "d/r20_histogram_value_loss": "the declaration: the reader's model has a head that this loss does not use, and "
    "may_idle was not declared",
}

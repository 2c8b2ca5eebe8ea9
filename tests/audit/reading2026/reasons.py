"""Why the first audit of the strangers' cases missed a defect, or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "a/d04_packed_boundaries_subtracted_twice": "the batch is one row, and law SE did not double a single row",
    "a/d05_overflow_requeued_as_rows": "Collator with rows=False did not check documents",
    "a/d06_mrope_positions_over_whole_pack": "Collator did not compare a packed sample with the sample alone",
    "a/d08_router_loss_times_world_size": "Accumulation checked nothing where rows_interact=True is declared",
    "a/d12_rate_from_local_progress": "Schedule had no place for a rate that each rank computes",
    "a/d13_history_eos_still_trained": "ChatTemplate had no place for answers that are not trained",
    "a/d16_tokens_counted_per_tensor_parallel_rank": "Ranks compared cuts, and the factor is the same in all",
    "a/d17_entropy_over_other_tokens_than_the_loss": "Ranks compared cuts, and the wrong tokens are averaged in all",
    "a/d18_denominator_counts_masked_completions": "no declaration has what a mean is taken over",
    "b/d03_interleave_first_prefix": "no subject has what a merge of steps should give",
    "b/d05_mtp_roll_unpadded_bounds": "law MI-PACKED could not cut the row: no role names its real lengths",
    "b/d06_document_ids_from_absent_eos": "Collator with rows=False did not check documents",
    "b/d10_warmup_subtracted_twice": "Schedule compared the last rate with its end, and not when the end is reached",
    "b/d14_prompt_mask_off_by_one": "Collator had no place for which tokens are supervised",
    "b/d15_filter_on_shaped_reward": "no subject has which groups a filter should keep",
    "b/d16_cp_max_loss_denominator": "no subject: the number depends on the cut by its definition",
    "b/d17_eval_weights_twice": "Ranks compared cuts, and the weights are applied twice in all",
}

ALARMS = {
    "a/d12_rate_from_local_progress": "the rates of ranks were declared as those of groups; one rank has fewer of them",
    "a/d13_history_eos_still_trained": "ChatTemplate had no place for answers that are not trained",
    "b/d01_stepwise_broadcast_last_mask": "the declaration has six trajectories, and law ADV also tries seven",
    "b/d05_mtp_roll_unpadded_bounds": "the reader's model has no attention, so its context has no effect (IG)",
    "b/d19_topk_kl_clamped": "the model has no attention (IG), and 1 - Σp is rounded for confident outputs (F64)",
    "a/r02_observation_prediction_loss": "the loss has a second mask, which no role declares; the added row keeps it",
    "a/r11_jagged_cosine_with_restarts": "Schedule applied the floor to the notches of declared restarts",
    "a/r12_rate_by_tokens_with_batch_ramp": "Schedule took the highest rate for the end of the warm-up",
    "a/r13_demonstration_turns_not_trained": "ChatTemplate had no place for answers that are not trained",
    "a/r18_distillation_as_policy_gradient": "the loss is one term with a weight, and the law switched it off",
    "b/r01_chat_template_turn_end": "ChatTemplate had no place for answers that are not trained",
    "b/r12_ema_decay_warmup": "Ema took every call for an update; this average moves at each fifth",
}

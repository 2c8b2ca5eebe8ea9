"""Why the first audit of the third reading missed a defect, or accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS = {
    "e/d19_truncated_support_ratio": "law PG-ONPOLICY rebuilt the gradient from ∂L/∂behaviour, which is not its weight "
    "where a detached ratio multiplies a log-prob",
    "e/r03_tree_rollouts_prefix_weights": "law MI repeated the last node id in the padding, and the loss counts ids; "
    "what stands in the padding of integers without a role is a guess",
    "f/r03_tool_output_trained_a_little": "law PG-ONPOLICY, as in e/d19",
    "f/r19_ratio_equal_to_its_own_detach": "every row has an answer by its words, which no declaration could state; "
    "laws MI and CV made rows without one",
    "f/r20_answers_rolled_to_other_prompts": "law F64 compared gradients of a saturated sigmoid, which are next to 0 "
    "in both dtypes",
}

"""Why the first audit of the seventh reading accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS = {
    "m/r13_overlap_by_one_chunks": "DATA compared declared targets with the packed batch in place of the document",
    "m/r14_prefix_shared_dpo": "the prompt is read from the chosen side alone, which no declaration states; law IG "
    "edits that of the rejected side",
    "m/r25_diloco": "the declared log-probs train, and the audit called them without gradients",
    "n/r14_shared_prefix_dpo": "law IG, as in m/r14",
    "n/r16_conv_resets_in_pack": "a convolution was declared as an adapter; it has no parameters of its own",
    "n/r23_reshard_adam_state": "the declared outputs train, as in m/r25",
    "p/r02_relora_jagged_cosine": "SCHEDULE expected a rate above the end half way, where a declared restart is at 0",
    "p/r06_cyclical_kl_weight": "SCHEDULE, as in p/r02",
}

"""Why the first audit of the fifth reading accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS = {
    "i/r12_luffy_shaping": "law PG-ONPOLICY rebuilt the gradient of rows whose behaviour the loss does not read",
    "i/r21_plackett_luce_dpo": "law F64 allowed no more rounding at margins of 30,000 than at usual ones",
    "j/r19_masked_diffusion_inverse_t": "the declaration overwrites the tokens outside of the answer, whose role it "
    "declares; law IG edits them",
    "k/r10_vtrace": "law PG-RATIO: returns from rewards per token contain the ratios of later tokens",
    "k/r18_plackett_luce_dpo": "law F64, as in i/r21",
    "l/r18_unlikelihood": "law F64: 1 - p is clamped at 1e-5, where float32 has two digits",
    "l/r20_plackett_luce": "law IG hid every second token and never the last one, and the score is read there",
}

"""Why the first audit of the fourth reading accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS = {
    "g/r08_decoupled_interpolated_prox": "the clip is around a centre between the sampler's and the policy's "
    "log-probs, and was declared as a clip of the ratio to the behaviour; no role states such a centre",
    "g/r19_moe_balance": "law F64 scaled up the last matrix to make outputs confident, and it was the router's",
    "h/r39_orpo_odds": "law PAIR tried the terms whose weight has no metric only where nothing else is in the loss",
}

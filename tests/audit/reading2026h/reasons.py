"""Why the first audit of the eighth reading missed a defect or accused a right step, in one line each."""

from __future__ import annotations

MISSES = {
    "x/d05_router_double_softmax": "the balancing loss takes probabilities for logits; its gradient still balances, "
    "and only the published definition shows the difference",
}
ALARMS = {
    "q/r01_rows_per_turn_divide_by_trajectories": "CV took clipped tokens for missing ones: the step makes its own "
    "advantages and declares no log-probs, so the law had no sign to change",
    "x/r04_overlong_masked_in_baseline": "CV, as in q/r01; PG-REWARD judged a row that the loss leaves out on purpose",
}

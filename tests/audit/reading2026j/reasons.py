"""Why the first audit of the tenth reading accused a right step, in one line each."""

from __future__ import annotations

MISSES: dict[str, str] = {}
ALARMS = {
    "y/r12_orpo_nll_on_prompt": "SE took terms by themselves only where their weight has a metric; the two terms have "
    "normalisers of their own",
}

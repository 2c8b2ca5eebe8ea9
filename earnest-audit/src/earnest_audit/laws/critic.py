"""PG-CRITIC: A clipped value loss takes the larger error.

old values far away   max((v - R)², (clipped v - R)²) depends on them; a minimum does not

Needs: roles values and returns
How: Two evaluations with old values far from every return must give different losses.
Exceptions: Clipped-only value losses (no maximum) depend on far values too.
Detects: openai/baselines #765 (minimum of the two squares)
"""

from __future__ import annotations

import math

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe

FAR = 1e3  # times the largest value or return: no clip range reaches there
VALUES = "old values that are far away"


def check(probe: Probe) -> Rows:
    """Two sets of old values, both far from every return. A rule that takes the smaller error depends on neither."""
    step, base = probe.step, probe.off_policy()
    key = step.roles["values"]
    largest = max(float(base[step.roles[r]].float().abs().max()) for r in ("values", "returns"))
    losses: list[float] = []
    for salt in (71, 72, 73, 74):  # a coarse dtype may round two large losses to one; four, hardly
        noise = edits.noise_like(base[key], edits.generator(step, salt)).float()
        far = (FAR * max(largest, 1.0) * (0.3 + noise.abs()) * noise.sign()).to(base[key].dtype)
        losses.append(probe.look({**base, key: far}).loss)
        apart, room = max(losses) - min(losses), 4 * probe.noise() * abs(losses[0])
        if len(losses) > 1 and not apart <= room:
            break
    if not all(map(math.isfinite, losses)):
        raise Ends(LAW.not_applicable(VALUES, "the loss overflows there"))
    yield LAW.finding(
        VALUES, f"the loss is {losses[0]:.4g} with one set, {losses[-1]:.4g} with another", "not the same",
        apart > room,
        "Old values that are a thousand times too large do not matter, so of the plain and the clipped value error the "
        "smaller one counts: a pessimistic clip takes the maximum. With the minimum, values that went the wrong way "
        "are never corrected.",
    )  # fmt: skip


LAW = Law(
    "PG-CRITIC", "critic", __doc__, check, quick=False, tier="contrib", perturbed=True,
    when=lambda step: step.kind == "policy gradient" and {"values", "returns"} <= step.roles.keys()
    and "rewards" not in step.roles,
)  # fmt: skip

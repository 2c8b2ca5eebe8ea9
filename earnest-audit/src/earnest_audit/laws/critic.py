"""PG-CRITIC: A clipped value loss takes the larger error, and the policy's loss has no gradient in the critic.

old values far away   max((v - R)², (clipped v - R)²) depends on them; a minimum does not
terms at weight 0     what the log-probs do not depend on, and a declared term trains, gets no gradient

Needs: roles values and returns; for the second, logprobs=fn and metrics={value loss: Metric(weight=setting)}
How: Two evaluations with old values far from every return must give different losses. Then, with all terms off,
parameters that the log-probs do not depend on must have a zero gradient.
Exceptions: Clipped-only value losses (no maximum) depend on far values too. Heads that no declared term trains are not
checked.
Detects: openai/baselines #765 (minimum of the two squares), returns - V(θ) that is not detached
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

FAR = 1e3  # times the largest value or return: no clip range reaches there
VALUES, UNTOUCHED = "old values that are far away", "the policy's loss has no gradient in the critic"


def check(probe: Probe) -> Rows:
    step = probe.step
    if {"values", "returns"} <= step.roles.keys() and "rewards" not in step.roles:
        yield _larger_error(probe)
    if step.logprobs is not None and step.terms:
        yield _critic_untouched(probe)


def _larger_error(probe: Probe) -> Finding:
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
        return LAW.not_applicable(VALUES, "the loss overflows there")
    return LAW.finding(
        VALUES, f"the loss is {losses[0]:.4g} with one set, {losses[-1]:.4g} with another", "not the same",
        apart > room,
        "Old values that are a thousand times too large do not matter, so of the plain and the clipped value error the "
        "smaller one counts: a pessimistic clip takes the maximum. With the minimum, values that went the wrong way "
        "are never corrected.",
    )  # fmt: skip


def _critic_untouched(probe: Probe) -> Finding:
    """Parameters that the log-probs do not reach, that a declared term trains, and that still move when all terms are
    off."""
    step, batch = probe.step, probe.off_policy()
    reached = probe.pull(probe.forward(step.logprobs, batch).sum())
    apart = [name for name, g in reached.parts.items() if g is None]
    if not apart:
        return LAW.not_applicable(UNTOUCHED, "log-probs depend on every parameter")
    full, alone = probe.gradient(batch), probe.gradient(batch, step.terms_off)
    room = probe.tolerance * full.norm()

    def pulled_at(name: str) -> bool:
        with_terms, without = full.parts[name], alone.parts[name]
        both = with_terms is not None and without is not None and not torch.equal(with_terms, without)
        return both and _size(without) > room

    pulled = [name for name in apart if pulled_at(name)]
    return LAW.finding(
        UNTOUCHED,
        f"{len(pulled)} of {len(apart)} parameters that only other terms train get a gradient with those terms off",
        "none", not pulled,
        f"With every declared term at weight 0, {', '.join(pulled[:3])} still gets a gradient, and the log-probs do "
        "not depend on it: the policy's loss depends on the critic through advantages that are not detached.",
    )  # fmt: skip


def _size(g: Tensor | None) -> float:
    return 0.0 if g is None else float(g.double().norm())


LAW = Law(
    "PG-CRITIC", "critic", __doc__, check, quick=False, tier="contrib", perturbed=True,
    when=lambda step: step.kind == "policy gradient" and bool({"values", "returns"} & step.roles.keys()),
)  # fmt: skip

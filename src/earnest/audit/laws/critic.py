"""PG-CRITIC: A clipped value loss takes the larger error, and the policy's loss has no gradient in the critic.

old values far away   max((v - R)², (clipped v - R)²) depends on them; a minimum does not
terms at weight 0     what the log-probs do not depend on, and a declared term trains, gets no gradient

Needs: roles values and returns; logprobs=fn and terms={value loss: its weight} for the second
How: Two evaluations with old values far from every return must give different losses. Then, with all terms off,
parameters that the log-probs do not depend on must have a zero gradient.
Exceptions: Clipped-only value losses (no maximum) depend on far values too. Heads that no declared term trains are not
checked.
Detects: openai/baselines #765 (minimum of the two squares), returns - V(θ) that is not detached
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.probe import Probe, fresh, seeded
from earnest.audit.verdict import Finding

FAR = 1e3  # times the largest value or return: no clip range reaches there


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.kind != "policy gradient" or not {"values", "returns"} & step.roles.keys():
        return
    with probe.perturbed():
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
        losses.append(probe.look({**base, key: _far(probe, base[key], largest, salt)}).loss)
        apart = max(losses) - min(losses)
        if len(losses) > 1 and not apart <= 4 * probe.noise() * abs(losses[0]):
            break
    if not all(map(math.isfinite, losses)):
        return LAW.not_applicable("old values that are far away", "the loss overflows there")
    return LAW.finding(
        "old values that are far away",
        f"the loss is {losses[0]:.4g} with one set, {losses[-1]:.4g} with another",
        "not the same",
        apart > 4 * probe.noise() * abs(losses[0]),
        "Old values that are a thousand times too large do not matter, so of the plain and the clipped value error the "
        "smaller one counts: a pessimistic clip takes the maximum. With the minimum, values that went the wrong way "
        "are never corrected.",
    )


def _far(probe: Probe, old: Tensor, largest: float, salt: int) -> Tensor:
    noise = edits.noise_like(old, edits.generator(probe.step, salt)).float()
    return (FAR * max(largest, 1.0) * (0.3 + noise.abs()) * noise.sign()).to(old.dtype)


def _critic_untouched(probe: Probe) -> Finding:
    """Parameters that the log-probs do not reach, that a declared term trains, and that still move when all terms are
    off."""
    step, batch, subject = probe.step, probe.off_policy(), "the policy's loss has no gradient in the critic"
    assert step.logprobs is not None
    probe.cost += 1
    with seeded(step.seed), torch.enable_grad():
        now = step.logprobs(step.model, fresh(batch))
    reached = dict(zip(probe.parameters, probe.differentiate(now.sum(), list(probe.parameters.values())), strict=True))
    apart = [name for name, g in reached.items() if g is None]
    if not apart:
        return LAW.not_applicable(subject, "log-probs depend on every parameter")
    full, alone = probe.gradient(batch), probe.gradient(batch, step.terms_off)
    usual = full.norm()

    def size(g: Tensor | None) -> float:
        return 0.0 if g is None else float(g.double().norm())

    pulled = [
        name
        for name in apart
        if size(alone.parts[name]) > probe.tolerance * usual and _differs(full.parts[name], alone.parts[name])
    ]
    return LAW.finding(
        subject,
        f"{len(pulled)} of {len(apart)} parameters that only other terms train get a gradient with those terms off",
        "none",
        not pulled,
        f"With every declared term at weight 0, {', '.join(pulled[:3])} still gets a gradient, and the log-probs do "
        "not depend on it: the policy's loss depends on the critic through advantages that are not detached.",
    )


def _differs(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and not torch.equal(a, b)


LAW = Law.of("PG-CRITIC", "critic", __doc__, check, quick=False, tier="contrib")

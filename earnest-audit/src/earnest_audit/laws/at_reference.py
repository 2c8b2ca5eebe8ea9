"""KL-ZERO: At the reference a KL penalty has value 0 and a zero gradient.

lp = lp₀   →   k2 = k3 = 0 and ∇k2 = ∇k3 = 0     (k1 = lp - lp₀ has a gradient there, with no reference in it: it is
no loss)
lp = lp₀ at every second token   →   no gradient there from a KL per token

Needs: a term whose metric is of the kind "kl to the reference"; role reference with per-token log-probs; logprobs=fn
How: The reference log-probs are set to the current policy's; the term's own gradient is the difference between two
weights. A token's own weight is the derivative by its sampler's log-prob, where that by its reference is 0.
Exceptions: k3's value estimates the reverse KL while its gradient is the forward one's; both vanish here.
Warns: (some tokens at the reference) a KL per token that is meant to be weighed by the ratio of its whole row.
Detects: CLaaS' k3 with the wrong sign, k1 as a loss, a KL that is logged and not the one that is trained, TRL #6594
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.limits import NEAR
from earnest_audit.probe import Probe

SUBJECT = "a penalty at the reference"
ROLES = (*edits.SAMPLERS, "reference")


def check(probe: Probe) -> Rows:
    step = probe.step
    named = {m: k for m, k in step.weights.items() if probe.metrics[m].kind == "kl to the reference"}
    LAW.needs(named, SUBJECT, "no term has a metric of the kind kl to the reference")
    if step.logprobs is None:
        raise Ends(LAW.not_declared(SUBJECT, "logprobs=lambda model, batch: …"))
    away = probe.off_policy()
    LAW.needs(probe.now().shape == away[step.roles["reference"]].shape, SUBJECT, "other shapes than logprobs has")
    at, room = probe.as_policy(away, ("reference",)), max(probe.tolerance, 1e-3)
    for metric, knob in named.items():
        weight = float(step.knobs[knob]) or 1.0
        usual = probe.gradient(away, {knob: 2 * weight}).minus(probe.gradient(away, {knob: 0.0})).norm()
        reading, without = probe.read(at, {knob: 2 * weight}), probe.slopes(ROLES, at, {knob: 0.0})
        here = reading.gradient.minus(without.gradient).norm() / max(usual, 1e-300)
        value = reading.metrics.get(metric, 0.0)
        yield LAW.finding(
            f"term {metric} at the reference", f"value {value:.2g}, own gradient {here:.2g} of the usual", "0 and 0",
            abs(value) <= room and here <= room,
            f"Where the policy equals the reference, {metric} and its gradient must be 0: the estimator's formula is "
            "off, or it is k1, whose gradient has no reference in it.",
        )  # fmt: skip
        if step.ratio_role in step.roles and "rewards" not in step.roles and here <= room:
            yield from _some_at(probe, metric, {knob: 2 * weight}, without.inputs)


def _some_at(probe: Probe, metric: str, knobs: dict[str, float], without: Mapping[str, Tensor | None]) -> Rows:
    """Every second token is at its reference. ``without``: the derivatives of all other terms."""
    away, now, key = probe.off_policy(), probe.now(), probe.step.roles["reference"]
    even = (torch.arange(now.shape[-1], device=now.device) % 2 == 0).expand_as(now)
    found = probe.slopes(ROLES, {**away, key: torch.where(even, now.to(away[key].dtype), away[key])}, knobs).inputs
    own = {r: (g if (rest := without.get(r)) is None else g - rest).abs() for r, g in found.items() if g is not None}
    whole = float(own["reference"].max()) if "reference" in own else 0.0
    at = {r: float(g[even].max()) / whole for r, g in own.items() if whole > 0}
    if len(at) < 2 or at.pop("reference") > max(probe.tolerance, 1e-3):
        return  # a KL of whole rows, or without a slope
    yield LAW.doubtful(LAW.finding(
        f"term {metric}, some tokens at the reference", f"gradient {max(at.values()):.2g} of the other tokens'",
        f"0, up to {NEAR}", max(at.values()) <= NEAR,
        f"A token at its reference gets a gradient from {metric}: other tokens' KL is multiplied by a ratio that it is "
        "in, that of the whole row.",
    ))  # fmt: skip


LAW = Law("KL-ZERO", "at the reference", __doc__, check, quick=False, perturbed=True,
             when=lambda step: "reference" in step.roles)  # fmt: skip

"""PG-ONPOLICY: With behaviour = current policy the policy gradient raises what was better, goes through the declared
log-probs, and a clip whose range contains 1 has no effect.

on-policy, no other term:   ∇L = -Σ w·∇lp by token,   w = ∂L/∂behaviour

Needs: roles advantages (or rewards) and behaviour; logprobs=fn(model, batch); the weights of the other terms
How: Clips are widened; the gradient is rebuilt from the loss's derivative by the behaviour log-probs; -∇L is compared
with ∇Σ A·lp, without logprobs in the logits that the model computes. What remains at advantages 0 is taken off first.
Exceptions: A step that whitens its advantages over the batch declares rows_interact=True. Where the ratio is under a
stop-gradient (value_is_loss=False), nothing is rebuilt.
Warns: (row "the gradient goes through …") a loss that uses log-probs beside the ratio.
Detects: TRL #4499, mlx-lm-lora #50, verl #2513, TRL #3029 and others (temperature), OpenRLHF feeb0283, a lost sign
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.ratio import at_one, on_policy, policy, proportion, token_weights, wider
from earnest_audit.limits import AWAY, NEAR, beside
from earnest_audit.logits import descent
from earnest_audit.measure import Reading
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

THROUGH = "the gradient goes through the declared log-probs"
RAISES = "descending the loss raises Σ A·lp"
REVERSED = "Tokens of a positive advantage do not rise: a sign is lost, or advantages are unused or of other rows."


def check(probe: Probe) -> Rows:
    step = probe.step
    if step.logprobs is None:
        yield from _raises_by_logits(probe)
        raise Ends(LAW.not_declared(THROUGH, "logprobs=lambda model, batch: …"))
    if step.ratio_role in step.roles:
        yield from _clips(probe)
    if "advantages" in step.roles:
        batch, here = on_policy(probe), policy(probe)
        now = probe.forward(step.logprobs, batch)  # after them: they move parameters, which would void its graph
        yield _through(probe, here, now)
        yield _raises_what_was_better(probe, here.gradient, batch, now)


def _clips(probe: Probe) -> Rows:
    """Wider clips change nothing; all in the evaluation that also doubles the advantages, and alone if that fails."""
    wide, together = wider(probe), math.inf
    if wide and "advantages" in probe.step.roles and not probe.step.rows_interact:
        together = proportion(probe)
    for knob, value in wide.items():
        change = together
        if together > probe.tolerance:
            change = at_one(probe).gradient.distance(probe.gradient(on_policy(probe), {**probe.quiet, knob: value}))
        yield probe.same(
            f"clip {knob} at ratio 1", change,
            f"{knob} has an effect at ratio 1: it clamps the ratio itself, or the unchanged policy's ratio is not 1.",
        )  # fmt: skip


def _through(probe: Probe, here: Reading, now: Tensor) -> Finding:
    """∇L = -c·Σ w·∇lp, w = ∂L/∂behaviour by token; c is not 1 where a second ratio is under a stop-gradient."""
    if probe.step.value_is_loss is False:  # there ∂L/∂behaviour is the detached weight's own slope
        return LAW.not_applicable(THROUGH, "stop-gradients by declaration")
    own = token_weights(here.inputs)
    if own is None or own.numel() != now.numel():
        return LAW.not_applicable(THROUGH, "the loss has no slope by the behaviour")
    rebuilt = probe.pull(-(own.reshape(now.shape).to(now.dtype) * now).sum(), retain=True)
    factor = here.gradient.best_scale(rebuilt)
    off, room = here.gradient.distance(rebuilt.times(factor)), max(probe.tolerance, NEAR)
    a: Tensor = probe.step.batch[probe.step.roles["advantages"]]
    active = (edits.taken(probe.step, now).flatten(1) != 0).any(-1) & (a.reshape(len(a), -1) != 0).any(-1)
    if off > room and bool((active & (own.reshape(len(own), -1) == 0).all(-1)).any()):
        return LAW.not_applicable(THROUGH, "the loss does not read the behaviour of some rows (demonstrations)")
    return LAW.doubtful(LAW.finding(
        THROUGH, f"{factor:.3g} × -Σ (∂L/∂behaviour)·∇lp, up to {off:.2g}", f"up to {room:.1g}, factor above 0",
        off <= room and factor > 0,
        "The loss differentiates other log-probs than logprobs returns (a temperature that is not applied there, a "
        "second shift), or has another gradient path.",
    ))  # fmt: skip


def _raises_what_was_better(probe: Probe, gradient: Gradient, batch: edits.Batch, now: Tensor) -> Finding:
    """Along -∇L the sum of A·lp over supervised tokens must rise; no other law detects this sign."""
    a: Tensor = batch[probe.step.roles["advantages"]]
    a = a[:, -now.shape[1] :] if a.ndim == now.ndim == 2 else a
    up = probe.pull(((a[..., None] if a.ndim < now.ndim else a) * edits.taken(probe.step, now, batch) * now).sum())
    cosine = -gradient.cosine(up)
    return probe.descends(RAISES, f"cosine {beside(cosine, NEAR)} between -∇L and ∇Σ A·lp", cosine, REVERSED, NEAR)


def _raises_by_logits(probe: Probe) -> Rows:
    """The same from the logits. Other terms are in it, so only a gradient that points away is a failure."""
    if "advantages" not in probe.step.roles or (found := descent(probe)) is None:
        return
    a: Tensor = probe.step.batch[probe.step.roles["advantages"]].float()
    a = a.reshape(len(a), -1)
    a = a[:, 1:] if a.shape[1] == found.rises.shape[1] + 1 else a
    if a.shape[1] not in (1, found.rises.shape[1]):
        return
    wanted = a * edits.taken(probe.step, found.rises)
    cosine = float(torch.cosine_similarity(wanted.flatten(), found.rises.flatten(), dim=0, eps=1e-30))
    yield probe.descends(
        RAISES, f"cosine {beside(cosine, AWAY)} between -∂L/∂lp and A, by token", cosine, REVERSED, AWAY
    )


LAW = Law(
    "PG-ONPOLICY", "on-policy", __doc__, check, quick=False, perturbed=True,
    when=lambda step: step.kind == "policy gradient",
    asks=((THROUGH, 'roles={"advantages": …}', lambda step: bool({"advantages", "rewards"} & step.roles.keys())),),
)  # fmt: skip

"""LAW, policy gradients: with behaviour = current policy the gradient is REINFORCE with the loss's own normaliser.

on-policy, no other term:   ∇L = -Σ c_t A_t ∇lp_t,   c_t = -∂L/∂A_t (ratio form)   or   -(∂L/∂A_t)/lp_t (surrogate form)
and then: linear in A; 0 for A = 0; a clip whose range contains 1 does nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.law import Law, not_declared
from earnest.audit.probe import Probe, fresh, seeded
from earnest.audit.step import Raises
from earnest.audit.verdict import Finding

ROOM = 0.05  # soft clips (SAPO) weigh the two signs a little differently; a wrong branch, mask or shift is far outside
# A clip's settings by their usual names, and by nothing less: smooth_eps, huber_delta, reward_clip and
# cliprange_value are other things.
LOW = (
    "clip",
    "clip_low",
    "eps",
    "epsilon",
    "epsilon_low",
    "eps_low",
    "clip_eps",
    "clip_epsilon",
    "clip_range",
    "clip_range_low",
    "cliprange",
    "cliprange_low",
    "eps_clip",
    "eps_clip_low",
    "clip_ratio",
    "clip_ratio_low",
)
HIGH = (
    "clip_high",
    "epsilon_high",
    "eps_high",
    "clip_range_high",
    "cliprange_high",
    "eps_clip_high",
    "clip_ratio_high",
)
BEYOND = ("delta", "dual_clip", "clip_dual", "clip_ratio_c", "importance_clip")  # other bounds that are inert at 1
MEANING = (
    "With the behaviour policy equal to the current one, a policy gradient is plain REINFORCE. This one is not: look "
    "for a swapped branch, a clamp that cuts ratio 1, a temperature that is not applied when log-probs are "
    "recomputed, a double shift."
)


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.kind != "policy gradient":
        return
    quiet = quiet_knobs(probe)
    if "advantages" not in step.roles:
        yield not_declared("LAW", "on-policy gradient", 'roles={"advantages": …}')
        return
    with probe.kicked():
        yield from _zero(probe, quiet)
        if step.logprobs is None:
            yield not_declared("LAW", "on-policy gradient = REINFORCE", "logprobs=lambda model, batch: …")
            return
        batch = on_policy(probe)
        how = whitening(probe, batch, quiet)
        yield from _linear(probe, batch, quiet, how)
        probe.cost += 1
        with seeded(step.seed), torch.enable_grad():
            now = step.logprobs(step.model, fresh(batch))
        if how is None:
            yield from _reinforce(probe, batch, quiet, now)
        else:  # ∂L/∂A_t then has every other row's part in it, and is no row's own weight
            yield Finding("LAW", "on-policy gradient = REINFORCE", how, "-", "not applicable")
        yield _raises_what_was_better(probe, batch, quiet, now, centred=how is not None)


def quiet_knobs(probe: Probe) -> dict[str, Any]:
    """Every declared term's weight at 0, so that the policy gradient stands alone."""
    knobs = [t.knob if isinstance(t, Raises) else t for t in probe.step.terms.values()]
    return dict.fromkeys([*knobs, *probe.step.switches], 0.0)


def on_policy(probe: Probe) -> edits.Batch:
    """Behaviour = what the current policy says; advantages of both signs."""
    return probe.kept_batch("on-policy", lambda: _on_policy(probe))


def _on_policy(probe: Probe) -> edits.Batch:
    step = probe.step
    batch = edits.off_policy(step)
    now = probe.now()
    for key in (step.roles[role] for role in ("behaviour", "proximal") if role in step.roles):
        batch[key] = now.to(batch[key].dtype).reshape(batch[key].shape)
    if "importance" in step.roles:
        batch[step.roles["importance"]] = torch.ones_like(batch[step.roles["importance"]])
    return batch


def _advantages(probe: Probe, batch: Mapping[str, Any], values: Tensor) -> edits.Batch:
    return {**batch, probe.step.roles["advantages"]: values}


def whitening(probe: Probe, batch: edits.Batch, quiet: Mapping[str, Any]) -> str | None:
    """How the step itself treats its advantages over the batch, where rows interact by declaration: centred ones do
    not feel a constant, scaled ones do not feel a factor. None: they are used as they are."""
    if not probe.step.rows_interact:
        return None
    a = batch[probe.step.roles["advantages"]]
    once = probe.gradient(batch, quiet)
    constant = a.float().abs().mean().to(a.dtype)
    if once.distance(probe.gradient(_advantages(probe, batch, a + constant), quiet)) <= ROOM:
        return "the step centres its advantages, rows interact by declaration"
    if once.distance(probe.gradient(_advantages(probe, batch, 2 * a), quiet)) <= ROOM:
        return "the step scales its advantages, rows interact by declaration"
    return None


def _zero(probe: Probe, quiet: Mapping[str, Any]) -> Iterator[Finding]:
    batch = probe.off_policy()
    key = probe.step.roles["advantages"]
    size = probe.gradient(batch).norm()
    left = probe.gradient(_advantages(probe, batch, torch.zeros_like(batch[key])), quiet).norm()
    others = bool(set(probe.step.knobs) - set(quiet) - set(_clips(probe)))
    outcome = left <= probe.tolerance * max(size, 1e-300)
    if not outcome and others and not probe.step.terms:
        yield Finding(
            "LAW", "zero advantages", f"gradient {left / max(size, 1e-300):.2g} of the usual", "0", "not declared",
            "There is another term in the loss; declare terms={metric: knob} so that it can be switched off.",
        )  # fmt: skip
        return
    yield LAW.finding(
        "zero advantages",
        f"gradient {left / max(size, 1e-300):.2g} of the usual",
        "0",
        outcome,
        "With all advantages 0 the policy gradient must vanish; something else is in the loss, or advantages are not "
        "what multiplies the ratio (a mask in their place?).",
    )


def _linear(probe: Probe, batch: edits.Batch, quiet: Mapping[str, Any], how: str | None) -> Iterator[Finding]:
    """Twice the advantages, twice the gradient; and wider clips change nothing. Both at once, apart only if that
    fails."""
    key, subject = probe.step.roles["advantages"], "linear in the advantages, on-policy"
    once, doubled = probe.gradient(batch, quiet), _advantages(probe, batch, 2 * batch[key])
    wider = {knob: float(probe.step.knobs[knob]) * 1.25 for knob in _clips(probe)}
    bend, both = 0.0, False
    if how is not None:
        yield Finding("LAW", subject, how, "-", "not applicable")
    else:
        bend = probe.gradient(doubled, {**quiet, **wider}).distance(once.times(2.0))
        both = bend <= probe.tolerance
        if not both and wider:
            bend = probe.gradient(doubled, quiet).distance(once.times(2.0))
        yield LAW.finding(
            subject,
            f"g(2A) differs from 2·g(A) by {bend:.2g}",
            f"≤ {probe.tolerance:.1g}",
            bend <= probe.tolerance,
            MEANING,
        )
    for knob, value in wider.items():
        change = bend if both else once.distance(probe.gradient(batch, {**quiet, knob: value}))
        yield LAW.finding(
            f"clip {knob} at ratio 1",
            f"moved the gradient by {change:.2g}",
            f"≤ {probe.tolerance:.1g}",
            change <= probe.tolerance,
            f"At ratio 1 a clip range that contains 1 cannot act, but {knob} does: it clamps the ratio itself, or "
            "the ratio is not 1 for the unchanged policy.",
        )


def _reinforce(probe: Probe, batch: edits.Batch, quiet: Mapping[str, Any], now: Tensor) -> Iterator[Finding]:
    """Take the normaliser from the loss itself, through its derivative by the advantages, and rebuild the gradient."""
    step = probe.step
    assert step.logprobs is not None
    key = step.roles["advantages"]
    if not batch[key].is_floating_point():
        return
    slope = probe.slope("advantages", batch, quiet)
    if slope is None:
        yield LAW.finding(
            "on-policy gradient = REINFORCE",
            "the loss's value does not depend on the advantages",
            "it does",
            False,
            MEANING,
        )
        return
    actual = probe.gradient(batch, quiet)
    where = edits.supervised(step, batch)
    forms = [_rebuilt(probe, now, slope, batch[key], where, form) for form in ("ratio", "surrogate")]
    factors = [actual.best_scale(form) for form in forms]
    off, factor = min((actual.distance(form.times(c)), c) for form, c in zip(forms, factors, strict=True))
    room = max(probe.tolerance, ROOM)
    yield LAW.finding(
        "on-policy gradient = REINFORCE",
        f"{factor:.3g} × -Σ c·A·∇lp with the loss's own c, up to {off:.2g}",
        f"up to {room:.1g}, factor above 0",
        off <= room and factor > 0,
        MEANING,
    )


def _rebuilt(probe: Probe, now: Tensor, slope: Tensor, advantages: Tensor, where: Tensor | None, form: str) -> Gradient:
    on = edits.fit(where, now) if where is not None else None
    mask = torch.ones_like(now) if on is None else on.to(now.dtype)
    if slope.ndim < now.ndim:  # one advantage a row: share its slope over the row as the loss would, by token
        lp = now.detach() if form == "surrogate" else torch.ones_like(now)
        total = (lp * mask).sum(-1)
        share = torch.where(
            total.abs() > 0, slope / torch.where(total == 0, torch.ones_like(total), total), torch.zeros_like(total)
        )
        c, a = -share[..., None] * mask, advantages[..., None]
    else:
        c, a = -slope, advantages
        if form == "surrogate":
            c = torch.where(now.detach() != 0, c / now.detach(), torch.zeros_like(c))
    surrogate = -(c.detach() * a.detach() * now).sum()
    found = probe.differentiate(surrogate, list(probe.parameters.values()), retain=True)
    return Gradient(dict(zip(probe.parameters, found, strict=True)))


def _raises_what_was_better(
    probe: Probe, batch: edits.Batch, quiet: Mapping[str, Any], now: Tensor, centred: bool
) -> Finding:
    """Along -∇L the sum of A·lp over supervised tokens must rise: the sign that no other law sees."""
    step = probe.step
    down = probe.gradient(batch, quiet)
    a: Tensor = batch[step.roles["advantages"]]
    a = a - a.mean() if centred else a
    on = edits.fit(edits.supervised(step, batch), now)
    mask = torch.ones_like(now) if on is None else on.to(now.dtype)
    score = ((a[..., None] if a.ndim < now.ndim else a) * mask * now).sum()
    found = probe.differentiate(score, list(probe.parameters.values()))
    up = Gradient(dict(zip(probe.parameters, found, strict=True)))
    cosine = -down.dot(up) / max(down.norm() * up.norm(), 1e-300)
    return LAW.finding(
        "descending raises what was better",
        f"cosine {cosine:+.2f} between -∇L and ∇Σ A·lp",
        "above 0",
        cosine > 0.05,
        "The step makes tokens with a positive advantage less likely: a sign is lost, or advantages are paired with "
        "other rows.",
    )


def _clips(probe: Probe) -> list[str]:
    return [k for k, v in probe.step.knobs.items() if isinstance(v, float) and last(k) in LOW + HIGH + BEYOND]


def last(knob: str) -> str:
    """The setting's own name: ``grpo.clip`` is a clip."""
    return knob.lower().rsplit(".", 1)[-1]


LAW = Law(
    code="LAW",
    name="on-policy",
    sentence="With behaviour = current policy the policy gradient is REINFORCE with the loss's own normaliser.",
    needs="roles advantages and behaviour; logprobs=fn(model, batch); terms, so that other terms can be switched off",
    how="The normaliser is read from ∂L/∂A; the gradient is rebuilt from it and compared; clips must be inert.",
    traps="A normaliser that differs from the textbook can be the recipe, so it is taken from the loss. Surrogates "
    "(−A·lp) are recognised as such. A step that whitens its advantages over the batch declares rows_interact=True.",
    caught="TRL #4499, mlx-lm-lora #50, verl #2513, TRL #3029 and others (temperature), OpenRLHF feeb0283",
    check=check,
    quick=False,
)

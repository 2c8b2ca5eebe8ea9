"""PG-ONPOLICY: With behaviour = current policy the policy gradient is linear in the advantages, 0 for advantages of 0,
raises what was better, and a clip whose range contains 1 has no effect.

Needs: roles advantages and behaviour; logprobs=fn(model, batch); weights of the other terms, which are switched off
How: Advantages are doubled and set to 0, clips are widened, and -∇L is compared with ∇Σ A·lp; without logprobs, in the
logits that the model computes. Law PG-REINFORCE uses the same evaluations.
Exceptions: A step that whitens its advantages over the batch declares rows_interact=True.
Detects: TRL #4499, mlx-lm-lora #50, verl #2513, a sign that is lost
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.ratio import (
    alone,
    at_one,
    at_zero,
    on_policy,
    others,
    policy,
    proportion,
    token_weights,
    whitening,
    wider,
    without_advantages,
)
from earnest_audit.limits import AWAY, NEAR, beside
from earnest_audit.logits import descent
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding, LawOutcome

REBUILT = """PG-REINFORCE: With behaviour = current policy the policy gradient is REINFORCE with the loss's own
normaliser.

on-policy, no other term:   ∇L = -Σ c_t A_t ∇lp_t,   c_t = -∂L/∂A_t (ratio form)   or   -(∂L/∂A_t)/lp_t (surrogate form)

Needs: roles advantages and behaviour; logprobs=fn(model, batch); weights of the other terms, which are switched off
How: The normaliser is taken from ∂L/∂A and its share per token from ∂L/∂behaviour; the gradient is rebuilt from them
and compared.
Exceptions: A normaliser that differs from the textbook can be the recipe, so it is taken from the loss. Of the usual
forms (ratio or surrogate; even shares, the loss's own, a product over the row, a regression) one is enough; a correct
step of another form is accused. A step that whitens its advantages declares rows_interact=True.
Detects: TRL #4499, mlx-lm-lora #50, verl #2513, TRL #3029 and others (temperature), OpenRLHF feeb0283
"""
REINFORCE, LINEAR = "on-policy gradient = REINFORCE", "linear in the advantages, on-policy"
OTHERS = {"reference", "reference_distribution", "teacher", "returns"}  # roles that other terms read
RAISES = "descending the loss raises Σ A·lp"
REVERSED = (
    "The step makes tokens with a positive advantage less likely: a sign is lost, or advantages are paired with other "
    "rows."
)
MEANING = (
    "With the behaviour policy equal to the current one, a policy gradient is plain REINFORCE. This one is not: look "
    "for a swapped branch, a clamp that cuts ratio 1, a temperature that is not applied when log-probs are "
    "recomputed, a double shift."
)


def check(probe: Probe) -> Rows:
    step, quiet = probe.step, probe.step.terms_off
    if "advantages" not in step.roles:
        yield from _own_advantages(probe)
        return
    if step.logprobs is None:
        batch = probe.off_policy()
        left = probe.gradient(without_advantages(probe, batch), quiet).norm()
        yield _zero(probe, left, probe.gradient(batch).norm(), affine=False)
        yield from _raises_by_logits(probe)
        raise Ends(REINFORCED.not_declared(REINFORCE, "logprobs=lambda model, batch: …"))
    rows = list(_at_ratio_one(probe))
    if not step.rows_interact and (bend := proportion(probe)) <= probe.tolerance:
        yield LAW.finding("zero advantages", f"g(2A) = 2·g(A) up to {bend:.2g}: nothing is left", "0", True)
    else:
        sound = not any(row.outcome == "fails" for row in rows)
        yield _zero(probe, at_zero(probe).gradient.norm(), at_one(probe).gradient.norm(), affine=sound)
    yield from rows


def _at_ratio_one(probe: Probe) -> Rows:
    """Checks of the advantages' part of the gradient; what remains without advantages is subtracted first."""
    batch, how = on_policy(probe), whitening(probe)
    yield from _linear(probe, batch, how)
    now = probe.forward(probe.step.logprobs, batch)
    if how is None:
        yield from _reinforce(probe, batch, now)
    else:  # ∂L/∂A_t then has every other row's part in it, and is no row's own weight
        yield REINFORCED.not_applicable(REINFORCE, how)
    yield _raises_what_was_better(probe, batch, now, centred=how is not None)


def _own_advantages(probe: Probe) -> Rows:
    """For a step that computes its advantages from rewards: the clips, which must have no effect at ratio 1."""
    step = probe.step
    if "rewards" not in step.roles:
        yield LAW.not_declared("on-policy gradient", 'roles={"advantages": …}')
        return
    yield REINFORCED.not_applicable(REINFORCE, "the step computes its own advantages")
    if not wider(probe):
        return
    if step.logprobs is None or step.ratio_role not in step.roles:
        yield LAW.not_declared("clips at ratio 1", 'logprobs=lambda model, batch: … and roles={"behaviour": …}')
        return
    for knob, value in wider(probe).items():
        there = probe.gradient(on_policy(probe), {**step.terms_off, knob: value})
        yield _inert(probe, knob, at_one(probe).gradient.distance(there), probe.tolerance)


def _zero(probe: Probe, left: float, usual: float, affine: bool) -> Finding:
    """``affine``: what remains at A = 0 is another term; the policy gradient is correct by itself."""
    step, share = probe.step, left / max(usual, 1e-300)
    known = set(step.knobs) - set(step.terms_off) - set(step.clips) or OTHERS & step.roles.keys()
    settings = bool(known) and not step.terms
    outcome: LawOutcome = "holds" if share <= probe.tolerance else "fails"
    meaning = (
        "With all advantages 0 the policy gradient must vanish; something else is in the loss, or advantages are not "
        "what multiplies the ratio (a mask in their place?)."
    )
    if outcome == "fails" and math.isfinite(left) and (affine or settings):
        outcome = "not declared"
        meaning = (
            "There is another term in the loss; declare metrics={name: Metric(weight=setting)}, or Setting(value, "
            '"weight"), so that it can be switched off.'
        )
    baseline = ' If the step subtracts a baseline from them first, they are rewards: declare roles={"rewards": …}.'
    return LAW.finding("zero advantages", f"gradient {share:.2g} of the usual", "0", outcome, meaning + baseline)


def _linear(probe: Probe, batch: edits.Batch, how: str | None) -> Rows:
    """Twice the advantages give twice the gradient; wider clips change nothing, and ratios of ρ only a factor ρ (or 1,
    without a ratio). All in one evaluation; separately only if that fails."""
    key, quiet = probe.step.roles["advantages"], probe.step.terms_off
    once, wide = policy(probe).gradient, wider(probe)
    bend, both = 0.0, False
    # A difference of two gradients is as exact as they are, and they may be larger than it.
    room = min(0.5, probe.tolerance * max(1.0, at_one(probe).gradient.norm() / max(once.norm(), 1e-300)))
    if how is not None:
        yield LAW.not_applicable(LINEAR, how)
    else:
        if others(probe) is None:
            bend = proportion(probe)
            both = bend <= probe.tolerance
        doubled = {**batch, key: 2 * batch[key]}
        for knobs in ({**quiet, **wide}, *([quiet] if wide else ())):
            if not both:
                bend = alone(probe, probe.gradient(doubled, knobs)).distance(once.times(2.0))
                both = bend <= room and knobs is not quiet
        yield probe.same(LINEAR, bend, MEANING, room=room, what="g(2A) differs from 2·g(A) by {}")
    for knob, value in wide.items():
        change = bend if both else once.distance(alone(probe, probe.gradient(batch, {**quiet, knob: value})))
        yield _inert(probe, knob, change, room)


def _inert(probe: Probe, knob: str, change: float, room: float) -> Finding:
    return probe.same(
        f"clip {knob} at ratio 1", change,
        f"At ratio 1 a clip range that contains 1 has no effect, but {knob} has one: it clamps the ratio itself, or "
        "the ratio is not 1 for the unchanged policy.", room=room,
    )  # fmt: skip


def _reinforce(probe: Probe, batch: edits.Batch, now: Tensor) -> Rows:
    """Take the normaliser from the loss itself, through its derivative by the advantages, and rebuild the gradient.

    A row's part is distributed over its tokens evenly, or as the loss itself does it (token weights, a discount), which
    is measured by its derivative by the behaviour."""
    step = probe.step
    a: Tensor = batch[step.roles["advantages"]]
    if not a.is_floating_point():
        return
    here = policy(probe)
    slope = here.inputs["advantages"]
    if slope is None:
        yield REINFORCED.finding(
            REINFORCE, "the loss's value does not depend on the advantages", "it does", False, MEANING
        )
        return
    total = float((a * slope).double().sum())
    linear = abs(total - here.loss) <= NEAR * float((a * slope).double().abs().sum())
    mask = edits.taken(step, now, batch)
    own = token_weights(here.inputs)
    own = own.reshape(now.shape).to(now.dtype) if own is not None and own.numel() == now.numel() else None
    even = _weights(now, slope, a, mask, mask)
    forms = [even, _weights(now, slope, a, mask, mask, surrogate=True)]
    if own is not None:
        shared = _weights(now, slope, a, mask, own * mask, whole=own)
        # A product over the row is differentiated by each of its N tokens: N times the row's part.
        forms += [shared, shared * mask.flatten(1).sum(-1).reshape(-1, *[1] * (now.ndim - 1))]
        if not linear:  # a regression on the advantages: what multiplies ∇lp is not A·∂L/∂A
            forms.append(own * mask)
    actual = here.gradient
    rebuilt = [probe.pull(-(weights.detach() * now).sum(), retain=True) for weights in forms]
    factors = [actual.best_scale(form) for form in rebuilt]
    off, factor = min((actual.distance(form.times(c)), c) for form, c in zip(rebuilt, factors, strict=True))
    room = max(probe.tolerance, NEAR)
    bent = "" if linear else " The loss is not linear in the advantages: c, its derivative by them, may be wrong."
    yield REINFORCED.finding(
        REINFORCE,
        f"{factor:.3g} × -Σ c·A·∇lp with the loss's own c, up to {off:.2g}" if off <= room
        else f"no multiple of -Σ c·A·∇lp with the loss's own c: off by {off:.2g}",
        f"up to {room:.1g}, factor above 0", off <= room and factor > 0,
        f"{MEANING} {_disagreement(own, even, mask)}{bent}",
    )  # fmt: skip


def _weights(
    now: Tensor,
    slope: Tensor,
    advantages: Tensor,
    mask: Tensor,
    shares: Tensor,
    whole: Tensor | None = None,
    surrogate: bool = False,
) -> Tensor:
    """c·A per token, from ∂L/∂A. ``shares``: how a row's part is distributed; ``whole``: what they are shares of."""
    if slope.ndim == now.ndim and slope.shape[-1] == 1 != now.shape[-1]:  # [B, 1] is one per row
        slope, advantages = slope[..., 0], advantages[..., 0]
    lp = now.detach() if surrogate else torch.ones_like(now)
    if slope.ndim < now.ndim:
        total = ((shares if whole is None else whole) * lp).sum(-1)
        even = (mask * lp).sum(-1)
        parts = torch.where(_far(total)[..., None], shares / _safe(total)[..., None], mask / _safe(even)[..., None])
        return -(slope * advantages)[..., None] * parts
    return torch.where(lp != 0, -slope * advantages / _safe(lp), torch.zeros_like(now)).detach()


def _far(total: Tensor) -> Tensor:
    return total.abs() > 1e-30


def _safe(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _disagreement(own: Tensor | None, expected: Tensor, mask: Tensor) -> str:
    """Which tokens have another gradient weight than their advantage gives, if the loss depends on the behaviour."""
    if own is None:
        return "The loss does not depend on the behaviour, so it is not known which tokens disagree."
    outside = int(((own != 0) & (mask == 0)).sum())
    size = float(expected.abs().max())
    wrong = ((own - expected).abs() > NEAR * size) & (mask != 0)
    if not bool(wrong.any()) and not outside:
        return (
            "Every token has the gradient weight of its advantage, so the log-probs differ: the loss differentiates "
            "others than the declared function returns (temperature, shift), or there is another gradient path."
        )
    says = [f"{outside} tokens outside the mask have a gradient."] if outside else []
    rows = wrong.reshape(len(wrong), -1)
    if bool(wrong.any()):
        row = int(rows.sum(-1).argmax())
        places = rows[row].nonzero()[:, 0].tolist()
        got, asked = own.reshape(rows.shape)[row, places[0]], expected.reshape(rows.shape)[row, places[0]]
        says.append(
            f"{int(rows.sum())} tokens disagree, most in row {row} (places {', '.join(map(str, places[:6]))}): at "
            f"{places[0]} the weight is {float(got):.3g}, the advantage's even share {float(asked):.3g}."
        )
    return " ".join(says)


def _raises_what_was_better(probe: Probe, batch: edits.Batch, now: Tensor, centred: bool) -> Finding:
    """Along -∇L the sum of A·lp over supervised tokens must rise; no other law detects this sign."""
    a: Tensor = batch[probe.step.roles["advantages"]]
    a = a - a.mean() if centred else a
    up = probe.pull(((a[..., None] if a.ndim < now.ndim else a) * edits.taken(probe.step, now, batch) * now).sum())
    cosine = -policy(probe).gradient.cosine(up)
    return probe.descends(RAISES, f"cosine {beside(cosine, NEAR)} between -∇L and ∇Σ A·lp", cosine, REVERSED, NEAR)


def _raises_by_logits(probe: Probe) -> Rows:
    """The same without a function for log-probs, from the logits that the model computes while the loss runs. Other
    terms are in it, so only a gradient that points away is a failure."""
    if (found := descent(probe)) is None:
        return
    a: Tensor = probe.step.batch[probe.step.roles["advantages"]].float()
    a = a.reshape(len(a), -1)
    if a.shape[1] - found.rises.shape[1] == 1:
        a = a[:, 1:]
    if a.shape[1] not in (1, found.rises.shape[1]):
        return
    wanted = a * edits.taken(probe.step, found.rises)
    length = float(wanted.norm() * found.rises.norm())
    cosine = float((wanted * found.rises).sum()) / length if length > 0 else 0.0
    yield probe.descends(
        RAISES, f"cosine {beside(cosine, AWAY)} between -∂L/∂lp and A, by token", cosine, REVERSED, AWAY
    )


def _rebuilt(probe: Probe) -> Rows:
    return (row for row in check(probe) if row.law == REINFORCED.code)


def is_policy_gradient(step: Step) -> bool:
    return step.kind == "policy gradient"


LAW = Law("PG-ONPOLICY", "on-policy", __doc__, check, quick=False, perturbed=True, when=is_policy_gradient)
REINFORCED = Law("PG-REINFORCE", "REINFORCE", REBUILT, _rebuilt, quick=False, tier="contrib", perturbed=True,
                    when=is_policy_gradient)  # fmt: skip

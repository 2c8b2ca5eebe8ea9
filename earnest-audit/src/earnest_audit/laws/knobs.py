"""KG: The gradient depends on every setting and not on those declared inert, every mode of an option differs from the
others, and a weight scales its term linearly.

Needs: settings={name: Setting(value, kind, modes)}, the kind "inert" for those that must not matter;
metrics={name: Metric(weight=setting)} for terms
How: Gradients (never loss values) at other values of the setting, from a perturbed, off-policy state.
Exceptions: A clip has no effect at ratio 1, so ratios on both sides are made first. Sensitivity is necessary, not
sufficient: a sign or swapped modes pass here and fail elsewhere.
Detects: SkyRL #1353 and #1053, transformers #44242, PEFT #3152, torchft #233 (alpha), NeMo-Automodel #3804 (means of
chunks), verl-recipe #151 (an end of β that is clamped)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.laws.clipping import at_ratios
from earnest_audit.laws.inputs import far
from earnest_audit.probe import Change, Probe
from earnest_audit.verdict import Finding

GONE = 1e-4  # no setting that acts smoothly changes a gradient that much within a factor of two


def check(probe: Probe) -> Rows:
    step, base = probe.step, probe.off_policy()
    LAW.needs(probe.gradient(base).finite(), "settings", "not finite off-policy", "See IG.")
    weights = set(step.weights.values())
    for knob, value in step.knobs.items():
        if step.kinds.get(knob) == "inert":
            yield _inert(probe, base, knob, value)
        elif knob not in weights:  # a weight is checked for more below
            yield _setting(probe, base, knob, value)
            yield from _vanished(probe, base, knob, value)
    for option, modes in step.options.items():
        yield _modes(probe, base, option, list(modes))
    yield from probe.tried({f"term {m}": _weight(probe, base, m, knob) for m, knob in step.weights.items()})


def candidates(value: Any) -> list[Any]:
    """Other legal values: two mild ones, then extreme ones."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2), value * 4 + 3]
    if isinstance(value, float):  # a threshold that is far from the present state matters only when it is crossed
        return [0.1, 1.0, 100.0] if value == 0 else [value * f for f in (1.5, 0.5, 1000.0, 0.1, 10.0, 100.0)]
    return []


def _inert(probe: Probe, base: edits.Batch, knob: str, value: Any) -> Finding:
    """A chunk length must not matter; a short one is tried, which leaves a remainder."""
    usual = [3 if value != 3 else 2, value * 4 + 3] if type(value) is int else candidates(value)[:2]
    others = probe.step.declared[knob].modes or usual
    changes = {other: change for other in others if (change := _moved(probe, base, {knob: other})) is not None}
    if not changes:
        return LAW.not_applicable(f"setting {knob}", f"no other legal value of {value!r} was found")
    worst = max(changes, key=lambda k: changes[k])
    return LAW.finding(
        f"setting {knob}", f"{value} → {worst} moved the gradient by {changes[worst]:.2g}",
        f"≤ {probe.tolerance:.2g}, declared inert", changes[worst] <= probe.tolerance,
        f"{knob} changes the gradient: means of chunks of unequal size are averaged, or a remainder is dropped.",
    )  # fmt: skip


def _moved(
    probe: Probe, batch: edits.Batch, other: dict[str, Any], beside: dict[str, Any] | None = None
) -> float | None:
    """The change of the gradient by other values of settings, with ``beside`` in both; None where the step refuses
    them, as it may."""
    try:
        here, there = probe.gradient(batch, beside), probe.gradient(batch, {**(beside or {}), **other})
    except Exception:
        return None
    return here.distance(there) if there.finite() else 0.0


def _setting(probe: Probe, base: edits.Batch, knob: str, value: Any) -> Finding:
    """The first trial that changes the gradient is enough."""
    step, subject, tried = probe.step, f"setting {knob}", list[Any]()
    at_one, inert = knob in step.clips and step.ratio_role not in step.roles, f'Setting({value!r}, "inert")'

    def changes() -> Iterator[Change]:
        for how, batch, other in _trials(probe, base, knob, value, at_one):
            if not how and tried and not probe.afford(1 if batch is base else 2):
                continue
            if (change := _moved(probe, batch, {knob: other})) is not None:
                tried.extend([] if how else [other])
                yield change, f": {value:g} → {other:g}{how}"

    row = probe.matters(
        subject, changes(),
        f"{knob} does nothing: it is not used, or in a branch that never runs, or in a value without a gradient. "
        f"Where it is meant to change nothing (a chunk length), declare {inert}.",
    )  # fmt: skip
    if row.outcome == "holds":
        return row
    if not tried:
        return LAW.not_declared(subject, f"the other modes of {knob}, Setting({value!r}, modes=(…)),")
    if at_one:
        return LAW.not_declared(
            subject, f"the role behaviour (a clip does nothing at ratio 1), or {inert} where every step is on-policy,"
        )
    if (mode := _in_other_modes(probe, base, knob, value)) is not None:
        return LAW.not_applicable(subject, f"it acts with {mode} only")
    if len(set(tried)) < min(3, len(candidates(value))):
        spent = f"not checked: no change by {len(tried)} values, and the budget is spent"
        return LAW.not_applicable(subject, spent, "Too few values were tried to conclude that it does nothing.")
    return row


def _vanished(probe: Probe, base: edits.Batch, knob: str, value: Any) -> Rows:
    """A number whose present value leaves almost no gradient, while one within a factor of two does not."""
    for other in candidates(value)[:2] if isinstance(value, float) and value and knob not in probe.step.clips else ():
        with suppress(Exception):  # the step may refuse this value
            here, there = (probe.gradient(base, knobs).norm() for knobs in (None, {knob: other}))
            if here < GONE * there:
                yield LAW.finding(
                    f"setting {knob}, its present value",
                    f"the gradient at {value:g} is {here / there:.1g} of the one at {other:g}", f"≥ {GONE:g}", False,
                    f"{knob} = {value:g} trains almost nothing: an end of its range is clamped, not treated apart.",
                )  # fmt: skip
                return


def _trials(
    probe: Probe, base: edits.Batch, knob: str, value: Any, at_one: bool
) -> Iterator[tuple[str, edits.Batch, Any]]:
    """Other values, from mild to strong, and the batch of each: with both signs of the advantages, since one side of a
    clip acts on one sign; with ratios beside a clip, of tokens and of whole rows, which leave every clip at once. Then,
    with a text and whatever it costs, far beyond the usual values, and where the references are far away (a hinge is
    inactive on its good side). Of a clip range below 1 the second value is so wide that nothing is clipped."""
    step, clip = probe.step, knob in probe.step.clips
    others = candidates(value)[: 2 if at_one else None]
    below = value if clip and isinstance(value, float) and 0 < value < 1 else 1.0
    others[1:3] = others[2:0:-1] if below < 1 else others[1:3]
    if below < 0.1:  # such as GSPO's: every ratio is beyond it
        yield from (("", batch, 1.5 * value) for batch in _beside(probe, base, value, rows=False))
        others = others[::-1] if value < 0.01 else others  # the far end first
    opposite = probe.kept("off-policy, opposite", lambda: edits.opposite(step, base) or {})
    signs, mild = (base, opposite) if opposite else (base,), others[:2]
    trials: list[tuple[str, Iterable[edits.Batch], list[Any]]] = [("", signs, mild)]
    trials += [("", _beside(probe, base, value), mild)] if clip else []
    trials.append(("", signs, others[2:]))
    if not at_one:
        if step.kinds.get(knob) == "target":  # a hinge whose every pair is active
            trials.append((", far beyond,", (base,), [-value, -1e3]))
        elif isinstance(value, float):
            trials.append((", far beyond,", (base,), [math.copysign(max(1e6 * abs(value), 1e3), value)]))
            trials.append((", far below,", (base,), [1e-6 * value]))
        references = [r for r in edits.LOGPROBS if r.startswith("reference") and r in step.roles]
        distant = (far(step, base, references, 30.0, odd) for odd in (0, 1) if references)
        trials += [] if clip else [(" with ratios of whole rows beside it", _beside(probe, base, value), mild)]
        trials.append((" with far references", distant, mild))
    for how, batches, values in trials:
        yield from ((how, batch, other) for batch in batches for other in values)


def _beside(probe: Probe, base: edits.Batch, value: Any, rows: bool = True) -> Iterator[edits.Batch]:
    """By turns, rows whose ratios (``rows``: their product) are a little above 1 + clip and below 1 - clip."""
    step = probe.step
    if step.ratio_role not in step.roles or step.logprobs is None:
        return

    def ratios(odd: int) -> edits.Batch:
        high, now = 1 + 1.25 * value if isinstance(value, float) and 0 < value < 1 else math.e**0.25, probe.now()
        turns = [(high, 1 / high)[(row + odd) % 2] for row in range(len(now))]
        return at_ratios(probe, probe.as_policy(base), turns, edits.taken(step, now, base) if rows else None)[0]

    for odd in (0, 1):
        yield probe.kept(f"ratios beside {value}, {odd}, {rows}", partial(ratios, odd))


def _in_other_modes(probe: Probe, base: edits.Batch, knob: str, value: Any) -> str | None:
    """The mode of an option in which the setting does act, if there is one."""
    for option, mode in ((o, mode) for o, modes in probe.step.options.items() for mode in modes[1:]):
        for other in candidates(value)[:2]:
            change = _moved(probe, base, {knob: other}, {option: mode}) if probe.afford(2) else None
            if change is not None and probe.is_change(change):
                return f"{option} = {mode!r}"
    return None


def _modes(probe: Probe, base: edits.Batch, option: str, modes: list[Any]) -> Finding:
    gradients = {modes[0]: probe.gradient(base)}
    for mode in modes[1:]:
        with suppress(Exception):  # a mode may contradict another setting
            gradients[mode] = probe.gradient(base, {option: mode})
    twins = probe.step.declared[option].twins
    pairs = [(a, b) for a, b in combinations(gradients, 2) if twins.isdisjoint({(a, b), (b, a)})]
    same = [f"{a!r} and {b!r}" for a, b in pairs if not probe.is_change(gradients[a].distance(gradients[b]))]
    if not pairs:
        return LAW.not_applicable(f"option {option}", "no other mode runs here")
    return LAW.finding(
        f"option {option}", f"{len(gradients)} modes, {len(same)} pairs with one gradient",
        "every mode its own gradient", not same,
        f"{option} = {'; '.join(same)} compute the same: the option is not obeyed, or two modes share a branch.",
    )  # fmt: skip


def _weight(probe: Probe, base: edits.Batch, metric: str, knob: str) -> Rows:
    """The weight must enter linearly: g(2w) - g(w) = g(w) - g(0), and not vanish."""
    declared = probe.step.knobs[knob]
    value = float(declared) or 1.0
    at = probe.gradient(base, None if declared else {knob: value})
    none, twice = (probe.gradient(base, {knob: weight}) for weight in (0.0, 2 * value))
    once, second = at.minus(none), twice.minus(at)
    share = once.norm() / max(at.norm(), none.norm(), 1e-300)
    alive = probe.is_change(share)
    yield LAW.finding(
        f"term {metric}", f"its own gradient is {share:.2g} of the whole", "above 0", alive,
        f"The term that {knob} weighs is not in the gradient (a no_grad, a detach), or not in the loss at all.",
    )  # fmt: skip
    # The difference of two large gradients is only as exact as they are; below that linearity cannot be judged.
    if alive and share > 4 * probe.tolerance:
        why = f"{knob} does not weigh the term linearly: it enters twice, or clips something on the way."
        room, what = max(probe.tolerance / share, 1e-3), f"doubling {knob} doubles it up to {{}}"
        yield probe.same(f"term {metric}", once.distance(second), why, room=room, what=what)


LAW = Law("KG", "settings", __doc__, check, perturbed=True, asks=(
    ("settings", "settings={name: Setting(value)}", lambda step: bool(step.knobs or step.options)),
))  # fmt: skip

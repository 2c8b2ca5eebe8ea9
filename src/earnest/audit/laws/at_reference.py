"""KL-ZERO: At the reference a KL penalty has value 0 and a zero gradient.

lp = lp₀   →   k2 = k3 = 0 and ∇k2 = ∇k3 = 0     (k1 = lp - lp₀ has a gradient there, with no reference in it: it is
no loss)

Needs: terms with a metric named kl; role reference with per-token log-probs; logprobs=fn
How: The reference log-probs are set to the current policy's; the term's own gradient is the difference between two
weights.
Exceptions: k3's value estimates the reverse KL while its gradient is the forward one's; both vanish here.
Detects: CLaaS' k3 with the wrong sign, k1 as a loss, a KL that is logged and not the one that is trained
"""

from __future__ import annotations

from collections.abc import Iterator

from earnest.audit.law import Law
from earnest.audit.probe import Probe
from earnest.audit.step import Raises
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    named = {m: t for m, t in step.terms.items() if isinstance(t, str) and _about_the_reference(m)}
    if "reference" not in step.roles:
        return
    if not named:
        why = "no term has a metric named like a kl"
        yield LAW.not_applicable("a penalty at the reference", why)
        return
    if step.logprobs is None:
        yield LAW.not_declared("a penalty at the reference", "logprobs=lambda model, batch: …")
        return
    key = step.roles["reference"]
    with probe.perturbed():
        away = probe.off_policy()
        now = probe.now()
        if now.shape != away[key].shape:
            yield LAW.not_applicable("a penalty at the reference", "other shapes than logprobs has")
            return
        at = {**away, key: now.to(away[key].dtype)}
        for metric, knob in named.items():
            assert not isinstance(knob, Raises)
            weight = float(step.knobs[knob]) or 1.0
            none = probe.gradient(away, {knob: 0.0})
            usual = probe.gradient(away, {knob: 2 * weight}).minus(none).norm()
            reading = probe.read(at, {knob: 2 * weight})
            here = reading.gradient.minus(probe.gradient(at, {knob: 0.0})).norm()
            value = reading.metrics.get(metric, 0.0)
            room = max(probe.tolerance, 1e-3)
            yield LAW.finding(
                f"term {metric} at the reference",
                f"value {value:.2g}, own gradient {here / max(usual, 1e-300):.2g} of the usual",
                "0 and 0",
                abs(value) <= room and here <= room * max(usual, 1e-300),
                f"Where the policy equals the reference, {metric} must be 0 and have a zero gradient. It does not: the "
                "estimator's formula is off, or it is k1, whose gradient has no reference in it.",
            )


def _about_the_reference(metric: str) -> bool:
    name = metric.lower()
    return "kl" in name and not any(word in name for word in ("approx", "ppo", "old", "mismatch"))


LAW = Law.of("KL-ZERO", "at the reference", __doc__, check, quick=False)

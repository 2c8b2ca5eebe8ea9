"""MR: A metric stays in its range, varies, is neutral for an unchanged policy, "loss" is the loss, and terms that are
declared to be the whole loss add up to it.

L = Σ weight·term + Σ fixed terms

Needs: a step that returns (loss, metrics); metrics={name: Metric(low, high, weight=…)}; all terms' weights for a sum
How: Metrics on the batch, in distant states, and with behaviour = current policy; undeclared kinds are guessed from
usual names. Then what a thousand times each term's weight adds to the loss.
Exceptions: A count or a setting is constant: Metric(moves=False). A metric with another normaliser than its term does
not add up: then declare no weight.
Warns: (an undeclared share or ratio that is constant, unless it is the clipped share beside a clip or the accuracy of
pairs; an undeclared ratio that is not 1, unless its name is "ratio") a share of what this batch does not have, such as
truncated answers, and a ratio that is 1 by design, or to another policy.
Detects: OpenRLHF feeb0283 (KL of an unchanged policy is -1), a mode field that keeps its default, a KL that is always
0, mlx-lm-lora #65 (ORPO without its likelihood, which is logged)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import torch

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.pairs import exchanged
from earnest_audit.laws.ratio import on_policy
from earnest_audit.limits import ROUNDED, STRONG
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding


def check(probe: Probe) -> Rows:
    step, reading = probe.step, probe.read()
    found = reading.metrics
    if not found:
        raise Ends(LAW.not_declared("metrics", "metrics by returning (loss, {name: value})"))
    if "loss" in found:
        off = abs(found["loss"] - reading.loss) / max(abs(reading.loss), 1e-9)
        yield LAW.agrees(
            "metric loss", off, max(1e-3, probe.tolerance), "What is logged as the loss is not what is minimised.",
            f"{found['loss']:.6g}, the loss is {reading.loss:.6g}: off by {{}}",
        )  # fmt: skip
    wild = [n for n, v in found.items() if not math.isfinite(v)]
    yield LAW.none(f"{len(found)} metrics", wild, f"{len(wild)} not finite", " is NaN or infinite on a good batch.")
    if missing := [n for n in step.facts if n not in found]:
        why = f"{missing[0]} is declared and the step does not return it."
        raise Ends(LAW.finding(f"metric {missing[0]}", "never returned", "returned", False, why))
    yield from _in_states(probe, found)
    with probe.perturbed():
        if step.logprobs is not None and step.ratio_role in step.roles:
            yield from _unchanged(probe)
        if step.fixed:
            yield from _sums(probe)


def _in_states(probe: Probe, found: Mapping[str, float]) -> Rows:
    """Metrics near and far away, and of the opposite policy: each stays in its range, and those that have to, move."""
    step, states = probe.step, [found]
    for state in (probe.perturbed(0.05), probe.perturbed(1.0), probe.opposite()):
        with state:
            states.append(probe.look(probe.off_policy()).metrics)
    facts = {name: m for name, m in probe.metrics.items() if name in found}
    for name, m in facts.items():
        if m.low is None and m.high is None:
            continue
        seen = [s[name] for s in states if name in s]
        room = 1e-5 * max([1.0, *(abs(v) for v in seen if math.isfinite(v))])
        inside = all((m.low is None or v >= m.low - room) and (m.high is None or v <= m.high + room) for v in seen)
        yield LAW.finding(
            f"metric {name}", f"{min(seen):.4g} … {max(seen):.4g}", f"[{m.low}, {m.high}]", inside,
            f"{name} leaves the range of such a metric: a sign, a missing log, a wrong denominator.",
        )  # fmt: skip
    moving = [name for name, m in facts.items() if m.moves or name in step.weights]

    def seen_in(name: str) -> list[float]:
        return [*(s[name] for s in states if name in s), *probe.logged(name)]

    for size in (0.3, 3.0, 10.0):
        if not all(_moves(seen_in(name)) for name in moving):
            with probe.perturbed(size):
                states.append(probe.look(probe.off_policy()).metrics)
                states += [probe.look(exchanged(step)).metrics] if step.kind == "preference" else []
    for name in moving:
        seen, unsure = seen_in(name), "moves" in facts[name].unsure
        if unsure and not _moves(seen):
            for way in (-1, 1):  # trained far; a loss may make every answer less likely
                with suppress(Exception), probe.along(probe.gradient(), way * probe.reach(1.0)):
                    seen.append(probe.look(dict(step.batch)).metrics[name])
                    seen.append(probe.look(edits.take_rows(step, torch.tensor([0]))).metrics[name])  # may be refused
        row = LAW.finding(
            f"metric {name}", f"{min(seen):.4g} … {max(seen):.4g} in {len(seen)} states", "it moves", _moves(seen),
            f"{name} is {seen[0]:.4g} in every state: a constant, a default that nothing sets, or 0 by construction.",
        )  # fmt: skip
        yield LAW.doubtful(row) if unsure else row


def _moves(seen: list[float]) -> bool:  # by more than rounding
    return not max(seen) - min(seen) <= 16 * torch.finfo(torch.float32).eps * min(map(abs, seen))


def _sums(probe: Probe) -> Rows:
    """L = Σ weight·term + Σ fixed terms, where all terms of the loss are declared; then each term by itself."""
    step, reading = probe.step, probe.read()
    weights = {m: float(step.knobs[knob]) * (-1 if step.facts[m].raises else 1) for m, knob in step.weights.items()}
    parts = {m: w * reading.metrics[m] for m, w in {**dict.fromkeys(step.fixed, 1.0), **weights}.items()}
    total = sum(parts.values())
    room = max(ROUNDED, probe.coarsest) * max([abs(reading.loss), *map(abs, parts.values())])
    sums = " + ".join(f"{v:.4g} ({m})" for m, v in parts.items())
    yield LAW.finding(
        "the sum of the terms", f"{sums} = {total:.4g}, the loss is {reading.loss:.4g}", f"equal, up to {room:.1g}",
        abs(total - reading.loss) <= room,
        "The declared terms are not the loss: one is not trained or is weighed twice, or another one is in the loss.",
    )  # fmt: skip
    for metric, knob in step.weights.items():
        with suppress(Exception):  # the step refuses such a weight, as it may
            yield _added(probe, metric, knob, reading.metrics[metric])


def _added(probe: Probe, metric: str, knob: str, value: float) -> Finding:
    """What the term adds to the loss, per unit of its weight: in the whole sum a small weight would hide it."""
    weight = STRONG * (float(probe.step.knobs[knob]) or 1.0)
    there, without = probe.look(None, {knob: weight}).loss, probe.look(None, {knob: 0.0}).loss
    own = (there - without) / weight * (-1 if probe.step.facts[metric].raises else 1)
    grain = 16 * probe.coarsest * max(abs(there), abs(without)) / abs(weight)
    room = max(ROUNDED, probe.coarsest) * max(abs(own), abs(value)) + grain
    return LAW.finding(
        f"term {metric} by itself", f"it adds {own:.4g} per unit of {knob}, the metric is {value:.4g}",
        f"equal, up to {room:.1g}", abs(own - value) <= room,
        f"What {knob} weighs is not what is logged as {metric}: another sign, mask or normaliser, or another term.",
    )  # fmt: skip


def _unchanged(probe: Probe) -> Rows:
    batch = on_policy(probe)
    found = probe.look(batch).metrics
    stored = [batch[probe.step.roles[r]] for r in edits.SAMPLERS if r in probe.step.roles]
    rounded = max((float(torch.finfo(v.dtype).eps * v.abs().max()) for v in stored if v.is_floating_point()), default=0)
    room = max(1e-3, probe.tolerance, rounded)  # log-probs that are stored in 16 bits
    for name, m in probe.metrics.items():
        if m.neutral is not None and name in found:
            row = LAW.finding(
                f"metric {name}, policy unchanged", f"{found[name]:.4g}", f"{m.neutral:g}, up to {room:.1g}",
                abs(found[name] - m.neutral) <= room,
                f"For the policy that sampled, {name} has to be {m.neutral:g}: log-probs are recomputed differently "
                "(temperature, shift), or the metric is another quantity under this name.",
            )  # fmt: skip
            yield LAW.doubtful(row) if "neutral" in m.unsure else row


LAW = Law("MR", "metrics", __doc__, check)

"""MR: A metric stays in its range, varies, is neutral for an unchanged policy, "loss" is the loss, and terms that are
declared to be the whole loss add up to it.

L = Σ weight·term + Σ fixed terms

Needs: a step that returns (loss, metrics); metrics={name: Metric(low, high, weight=…)}; for the sum, the weight of
every term: the setting that weighs it, or 1.0
How: Metrics on the batch, in distant states, and with behaviour = current policy. Undeclared fractions, rates, ratios
and accuracies have a range by their names. Then each term by itself: what a thousand times its weight adds to the loss.
Exceptions: Counts and settings are constant by nature; only declared metrics, clipped shares and accuracies of pairs
must vary, unless Metric(moves=False) declares otherwise. A metric with another normaliser than its term does not add
up; then declare no weight of 1.0.
Detects: OpenRLHF feeb0283 (KL of an unchanged policy is -1), a mode field that keeps its default, a KL that is always
0, mlx-lm-lora #65 (ORPO without its likelihood, which is logged)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.clipping import CLIPPED, clip_range, of_clip
from earnest_audit.laws.pairs import exchanged
from earnest_audit.laws.ratio import on_policy
from earnest_audit.limits import ROUNDED, STRONG
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

# Metrics that compare the current policy with the behaviour policy, by their usual names, and what they are when both
# are one.
UNCHANGED = {"approx_kl": 0.0, "ppo_kl": 0.0, "old_kl": 0.0, "mismatch_kl": 0.0, "ratio": 1.0, "ratio_mean": 1.0,
             "mean_ratio": 1.0, **dict.fromkeys(CLIPPED, 0.0)}  # fmt: skip
SHARES = {"fraction", "frac", "clipfrac", "accuracy", "accuracies", "rate"}  # between 0 and 1, declared or not
NOT_SHARES = {"learning", "lr", "decay", "growth", "sampling", "token", "tokens", "step"}  # such rates may be anything
RATIOS = {"ratio", "prob", "probability", "importance", "likelihood", "policy", "clip"}  # of these, never below 0
PAIRED = {"rewards", "reward", "pair", "pairs", "preference", "accuracy", "accuracies", "train"}


def check(probe: Probe) -> Rows:
    step, reading = probe.step, probe.read()
    found = dict(reading.metrics)
    if not found:
        raise Ends(LAW.not_declared("metrics", "metrics by returning (loss, {name: value})"))
    if "loss" in found:
        off = abs(found["loss"] - reading.loss) / max(abs(reading.loss), 1e-9)
        yield LAW.finding(
            "metric loss", f"{found['loss']:.6g}, the loss is {reading.loss:.6g}", "the same",
            off <= max(1e-3, probe.tolerance), "What is logged as the loss is another number than what is minimised.",
        )  # fmt: skip
    wild = [n for n, v in found.items() if not math.isfinite(v)]
    why = f"{', '.join(wild)} is NaN or infinite on a good batch."
    yield LAW.finding(f"{len(found)} metrics", f"{len(wild)} not finite", "all finite", not wild, why)
    if missing := [n for n in step.facts if n not in found]:
        why = f"{missing[0]} is declared and the step does not return it."
        raise Ends(LAW.finding(f"metric {missing[0]}", "never returned", "returned", False, why))
    yield from _in_states(probe, found)
    with probe.perturbed():
        if step.logprobs is not None and step.ratio_role in step.roles:
            yield from _unchanged(probe)
        if step.fixed:
            yield from _sums(probe)


def _in_states(probe: Probe, found: dict[str, float]) -> Rows:
    """Metrics near and far away, and of the opposite policy: each stays in its range, and declared ones vary."""
    step, states, named = probe.step, [found], _named(probe, found)
    for size in (0.05, 1.0):
        with probe.perturbed(size):
            states.append(dict(probe.look(probe.off_policy()).metrics))
    with probe.moved("reversed", lambda p, _: -2 * p.detach().float()):
        states.append(dict(probe.look(probe.off_policy()).metrics))
    for name, (low, high) in {**named, **{n: (m.low, m.high) for n, m in step.facts.items()}}.items():
        seen = [s[name] for s in states if name in s]
        room = 1e-5 * max(1.0, *(abs(v) for v in seen if math.isfinite(v)), 1.0)
        inside = all((low is None or v >= low - room) and (high is None or v <= high + room) for v in seen)
        yield LAW.finding(
            f"metric {name}", f"{min(seen):.4g} … {max(seen):.4g}", f"[{low}, {high}]", inside,
            f"{name} leaves the range that it cannot leave: it is another quantity (a sign, a missing log, a wrong "
            "denominator).",
        )  # fmt: skip
    declared = [n for n, m in step.facts.items() if m.moves or n in step.weights]
    for name in dict.fromkeys([*declared, *_must_move(probe, named)]):
        seen = [*(s[name] for s in states if name in s), *probe.logged(name)]
        for size in (0.3, 3.0, 10.0):
            if not _moves(seen):
                with probe.perturbed(size):
                    seen.append(probe.look(probe.off_policy()).metrics.get(name, seen[0]))
                    if step.kind == "preference":
                        seen.append(probe.look(exchanged(step)).metrics.get(name, seen[0]))
        yield LAW.finding(
            f"metric {name}", f"{min(seen):.4g} … {max(seen):.4g} in {len(seen)} states", "it moves", _moves(seen),
            f"{name} is {seen[0]:.4g} whatever the policy and the batch: it is a constant, a default that nothing "
            "sets, or 0 by construction.",
        )  # fmt: skip


def _moves(seen: list[float]) -> bool:  # by more than rounding
    return not max(seen) - min(seen) <= 16 * torch.finfo(torch.float32).eps * min(map(abs, seen))


def _words(name: str) -> list[str]:
    return [w for w in re.split(r"[^a-z]+", name.lower()) if w and w not in ("mean", "avg", "min", "max")]


def _named(probe: Probe, found: dict[str, float]) -> dict[str, tuple[float | None, float | None]]:
    """Undeclared metrics whose names make them shares (0 to 1), or ratios (0 or above), and their ranges."""
    ranges: dict[str, tuple[float | None, float | None]] = {}
    for name in found.keys() - probe.step.facts.keys():
        words = _words(name)
        if set(words) & (SHARES - {"rate"}) or (words[-1:] == ["rate"] and not NOT_SHARES & set(words)):
            ranges[name] = (0.0, 1.0)
        elif words[-1:] == ["ratio"] and set(words) <= RATIOS:
            ranges[name] = (0.0, 1.0 if "clip" in words else None)
    return dict(sorted(ranges.items()))


def _must_move(probe: Probe, named: Iterable[str]) -> list[str]:
    """The clipped share where there is a clip, and the accuracy of pairs: they vary over far-off states."""
    step, right = probe.step, {"accuracy", "accuracies"}
    clipped = clip_range(probe)[0] is not None and step.ratio_role in step.roles
    words = {name: set(_words(name)) for name in named} if step.kind == "preference" else {}
    paired = [name for name, own in words.items() if own & right and own <= PAIRED]
    return [*paired, *(name for name in named if clipped and of_clip(name))]


def _sums(probe: Probe) -> Rows:
    """L = Σ weight·term + Σ fixed terms, where all terms of the loss are declared; then each term by itself."""
    step, reading, subject = probe.step, probe.read(), "the sum of the terms"
    weights = dict.fromkeys(step.fixed, 1.0)
    for metric, knob in step.weights.items():
        weights[metric] = float(step.knobs[knob]) * (-1 if step.facts[metric].raises else 1)
    parts = {m: w * reading.metrics[m] for m, w in weights.items()}
    total, scale = sum(parts.values()), max([abs(reading.loss), *map(abs, parts.values())])
    room = max(ROUNDED, probe.coarsest) * scale
    sums = " + ".join(f"{v:.4g} ({m})" for m, v in parts.items())
    yield LAW.finding(
        subject, f"{sums} = {total:.4g}, the loss is {reading.loss:.4g}", f"equal, up to {room:.1g}",
        abs(total - reading.loss) <= room,
        "The declared terms do not add up to the loss: one is logged and not trained, is weighed twice, or another one "
        "is in the loss.",
    )  # fmt: skip
    for metric, knob in step.weights.items():
        try:
            yield _added(probe, metric, knob, reading.metrics[metric])
        except Exception:
            continue  # the step refuses such a weight, as it may


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
    for name, value in found.items():
        expected = probe.step.facts[name].neutral if name in probe.step.facts else None
        expected = UNCHANGED.get(name.lower().rsplit("/", 1)[-1]) if expected is None else expected
        if expected is None:
            continue
        room = max(1e-3, probe.tolerance, rounded)  # log-probs that are stored in 16 bits
        yield LAW.finding(
            f"metric {name}, policy unchanged", f"{value:.4g}", f"{expected:g}", abs(value - expected) <= room,
            f"For a policy that equals the one that sampled, {name} is {expected:g}. It is not: log-probs are "
            "recomputed differently (temperature, shift), or the metric is another quantity under this name.",
        )  # fmt: skip


LAW = Law("MR", "metrics", __doc__, check)

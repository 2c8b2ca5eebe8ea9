"""MR-MEAN: A metric that is an average does not depend on the number of rows or on the padding.

every row twice          the same number; or as many times as the loss itself, where that is a sum
3 columns of padding     the same number

Needs: a step that returns (loss, metrics) under usual names, or declared metrics; ids and a mask for padding
How: Metrics of the batch with every row twice, and with three more columns of padding.
Exceptions: Sums, extremes, spreads, counts and lengths are left out by their names; where the loss itself is a sum, its
metrics may be sums.
Detects: TRL #6121 (an entropy that counts padding), a KL that is summed and logged as a mean
"""

from __future__ import annotations

import re
from functools import partial

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.masks import WIDE
from earnest_audit.measure import Reading
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

USUAL = {"kl", "entropy", "accuracy", "accuracies", "margin", "margins", "ratio", "clipfrac", "frac", "fraction",
         "nll", "perplexity", "ppl", "logp", "logps", "logprob", "logprobs", "loss"}  # fmt: skip
# Sums, extremes, spreads and lengths may depend on the rows or the padding.
APART = {"sum", "total", "count", "num", "tokens", "max", "min", "pad", "padding", "padded", "length", "len", "std",
         "var", "time", "step", "lr", "sec"}  # fmt: skip


def check(probe: Probe) -> Rows:
    step = probe.step
    names = [n for n in probe.look().metrics if is_average(probe, n)]
    if not names:
        raise Ends(LAW.not_applicable("averages", "no metric that is known to be one"))
    with probe.perturbed():
        here = probe.look()
        if step.value("ids") is not None and edits.supervised(step) is not None:
            padded = (partial(_compare, probe, "3 more columns of padding", names, here, edits.pad(step, keys=keys))
                      for keys in edits.readings(step))  # fmt: skip
            yield probe.guessed("averages, 3 more columns of padding", padded, WIDE)
        if step.rows > 1 and not step.rows_interact:
            twice = partial(_compare, probe, "every row twice", names, here, edits.repeat_rows(step))
            yield probe.guessed("averages, every row twice", [twice], WIDE)


def is_average(probe: Probe, name: str) -> bool:
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    declared = name in probe.step.facts and (name in probe.step.weights or probe.step.facts[name].moves)
    return not words & APART and (declared or bool(words & USUAL))


def _compare(probe: Probe, subject: str, names: list[str], here: Reading, batch: edits.Batch) -> Finding:
    there = probe.look(batch)
    relative = max(1e-3, probe.tolerance)
    grown = there.loss / here.loss if here.loss else 1.0
    off = []
    for name in (n for n in names if n in there.metrics):
        was, now = here.metrics[name], there.metrics[name]
        # A mean of what cancels is as exact as its parts, which are a few nats.
        room = relative * max(abs(was), abs(now)) + min(32 * probe.coarsest, max(1e-4, probe.coarsest))
        if abs(now - was) > room and abs(now - grown * was) > room:
            off.append(f"{name} {was:.4g} → {now:.4g}")
    return probe.fair(LAW.finding(
        f"averages, {subject}", "; ".join(off) or f"{len(names)} metrics stay", f"the same, within {relative:.1g}",
        not off,
        "An average that changes with the number of rows or of padded columns is divided by something else than what "
        "it sums, or sums more than what is supervised: what is logged depends on how the batch was cut.",
    ))  # fmt: skip


LAW = Law("MR-MEAN", "averages", __doc__, check, quick=False)

"""DIV-ZERO: Identical distributions have the least cost and a zero gradient in one declared part of the loss, different
ones have a gradient, forward and reverse KL have their names, and a mixture's weight does not make the divergence
negative, or larger at both of its ends.

teacher = student          →   gradient 0, divergence 0 (a cross-entropy: the teacher's entropy)
teacher sure of one token  →   ∇ forward KL = ∇NLL of that token; ∇ reverse KL is not
GJS_α between disjoint distributions is H(α)·scale, largest at α = ½: swapped outer weights reverse that

Needs: roles teacher and student=fn; where another loss is mixed in, its weight, or Setting(value, pure=…);
for the directions, an option of the kind "forward kl" or "reverse kl"
How: The teacher is replaced by the student's own output. Declared terms are off, and each is taken by itself. Then
it puts all its probability on a token that the student finds unlikely.
Exceptions: In fp32 a mixture leaves about 1e-7; the tolerance follows from the dtype. A cross-entropy keeps the
teacher's entropy as its value. A setting that mixes in a likelihood declares the value that switches it off, pure=….
Warns: (forward and reverse, where the kind is guessed from the names of the modes) libraries that name them otherwise.
Detects: a log-softmax over an axis of length 1 (always 0), CLaaS α = 0, transformers #45120, swapped mixture weights,
twinkle #112 and aprender #2153 (forward and reverse swapped)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.facts import DIRECTIONS
from earnest_audit.law import Law, Rows
from earnest_audit.laws.parts import Part, relative, undeclared
from earnest_audit.laws.ratio import on_policy
from earnest_audit.probe import Probe

IDENTICAL = "identical distributions"
ENDS = (1e-3, 0.5, 1 - 1e-3)
CLEAR = 0.02  # the two directions' cosines are near each other where the student is sure of one token as well
# Swapped, the ends are (1-ε)·ln(1/ε)/ln 2 ≈ 10 times the middle; Amari's α-divergence, which is right, has 250.
TURNED = (1.5, 40.0)


def check(probe: Probe) -> Rows:
    step = probe.step
    key = step.roles["teacher"]
    base = on_policy(probe) if step.ratio_role in step.roles else step.batch  # 0 on-policy for teachers as advantages
    own: Tensor = probe.forward(step.student, graph=False).detach()
    twin = own.to(step.batch[key].dtype).reshape(step.batch[key].shape)
    same = probe.kept("the student as its teacher", lambda: {**base, key: twin})
    # A divergence is quadratic at its zero, so its gradient there is of the order of sqrt(eps) at worst.
    room = max(probe.tolerance, torch.finfo(own.dtype).eps ** 0.5 if own.is_floating_point() else 1e-3)
    found = relative(probe, base, same, room)
    if found:
        part, size = found[0].part, found[0].size
        usual, loss = part.loss(probe, base), part.loss(probe, same)
        scale = max(abs(usual), 1e-12)
        least = -room * max(scale, 1.0) <= loss <= max(usual, 0.0) + room * max(scale, 1.0)
        missing = undeclared(probe, base, same, room) if size > room else None
        yield LAW.not_declared(IDENTICAL, missing) if missing else LAW.finding(
            IDENTICAL, f"cost {loss:.2g} (usually {scale:.2g}), {', '.join(map(str, found))}",
            "0 (or the teacher's entropy) and 0", size <= room and least,
            "A student that equals its teacher has a gradient: mixture weights are swapped, log-probs are mixed, not "
            "probabilities, supports or temperatures differ; or another term is in the loss: declare its weight, "
            "Metric(weight=setting), or Setting(value, pure=…) where a setting mixes the two.",
        )  # fmt: skip
    size = found[0].usual.norm() if found else 0.0
    yield LAW.finding(
        "different distributions", f"cost {probe.read(base).loss:.2g}, gradient {size:.2g}", "not 0", size > 0,
        "The divergence is always 0: its mixture is the student itself (α = 0), or a softmax has an axis of length 1.",
    )  # fmt: skip
    if found:
        yield from _weights_swapped(probe, found[0].part, key, own)
        yield from _direction(probe, found[0].part, key)


def _direction(probe: Probe, part: Part, key: str) -> Rows:
    """For a teacher that is certain of one token, ∇KL(teacher ‖ student) is that token's ∇NLL, ∇KL(student ‖ teacher)
    is not. By the kind of an option, its present mode is the nearest to it, or is not."""
    step, teacher = probe.step, probe.step.batch[key]
    for option in (n for n in step.options if step.kinds[n] in DIRECTIONS and teacher.ndim > 2):
        own: Tensor = probe.forward(step.student).reshape(teacher.shape)
        sure = {**step.batch, key: opposite_teacher(teacher, own.detach())}
        logs = own.log() if edits.probability_like(own.detach()) else own.log_softmax(-1)
        picked = logs.gather(-1, sure[key].argmax(-1, keepdim=True))[..., 0]
        wanted = probe.pull(-(picked * edits.taken(step, picked)).sum())
        modes = (replace(part, knobs={**part.knobs, option: mode}) for mode in step.options[option])
        here, *others = (mode.gradient(probe, sure).cosine(wanted) for mode in modes)
        kind, name = step.kinds[option], step.options[option][0]
        row = probe.descends(
            f"option {option}: {name} is a {kind}",
            f"cosine {here:.2f} to ∇NLL of a certain teacher's token, the other modes up to {max(others):.2f}",
            here - max(others) if kind == "forward kl" else max(others) - here,
            f"Of all modes a forward KL(teacher ‖ student) is the nearest to a certain teacher's likelihood. {name} is "
            f"not where a {kind} is: forward and reverse, or the arguments of a KL function, are swapped.", -CLEAR,
        )  # fmt: skip
        yield LAW.doubtful(row) if option in step.guesses else row


def _weights_swapped(probe: Probe, part: Part, key: str, own: Tensor) -> Rows:
    """A generalised Jensen–Shannon divergence is concave in its weight and 0 at both ends; with swapped outer weights
    it is several times larger near both. Other divergences rise or fall from one end to the other."""
    step = probe.step
    teacher: Tensor = step.batch[key]
    found = [k for k, v in step.numbers.items() if step.kinds.get(k) == "mixture" and 0 < v < 1]
    knob = next((k for k in found if k not in part.knobs), None)
    if knob is None or part.less is not None or teacher.ndim < 3 or not teacher.is_floating_point():
        return
    far = {**step.batch, key: opposite_teacher(teacher, own.reshape(teacher.shape))}
    try:
        values = [probe.look(far, {**part.knobs, knob: at}).loss for at in ENDS]
    except Exception:
        return  # the step refuses such weights: it is no mixture's share
    low, middle, high = values
    negative = min(values) < -1e-3 * max(map(abs, values))
    turned = all(TURNED[0] < end / max(abs(middle), 1e-300) < TURNED[1] for end in (low, high))
    yield LAW.finding(
        f"a mixture's weight {knob}",
        f"{low:.2g}, {middle:.2g} and {high:.2g} near 0, at ½ and near 1, for a teacher far away",
        "never below 0, and not larger near both ends", not negative and not turned,
        "A generalised Jensen–Shannon divergence is never negative and largest at ½: here the mixture's weights are "
        "swapped against the outer ones, or one of its halves has a wrong sign or another normaliser.",
    )  # fmt: skip


def opposite_teacher(teacher: Tensor, own: Tensor) -> Tensor:
    """A teacher whose probability is all on the token that the student finds least likely, in the teacher's form; so
    far away that even the thousandth root of its other probabilities is next to 0."""
    lowest = own.argmin(-1, keepdim=True)
    low, high = (-4000.0, -1e-6) if edits.log_like(teacher) else (-2000.0, 2000.0)
    if edits.probability_like(teacher):
        low, high = 1e-12, 1.0
    return torch.full_like(teacher, low).scatter(-1, lowest, high)


LAW = Law(
    "DIV-ZERO", "identical", __doc__, check, quick=False, perturbed=True, when=lambda step: "teacher" in step.roles,
    asks=(
        (IDENTICAL, "student=lambda model, batch: …, in the teacher's form,", lambda step: step.student is not None),
        (IDENTICAL, "logprobs=lambda model, batch: …", lambda s: s.logprobs is not None or s.ratio_role not in s.roles),
    ),
)  # fmt: skip

"""KL-DIRECTION: A mode named forward KL is closer to the likelihood of a certain teacher's token than the mode named
reverse KL.

For a teacher that is certain of one token, the forward KL is that token's negative log-likelihood; the reverse one is
not.

Needs: an option with modes named forward and reverse; roles teacher and student=fn
How: The teacher puts all its probability on a token that the student finds unlikely; the gradients of both modes are
compared with that token's.
Exceptions: Checked only where both names are among an option's modes.
Detects: twinkle #112 and aprender #2153 (forward and reverse swapped)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Law
from earnest_audit.laws.identical import opposite_teacher
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

FORWARD = ("forward_kl", "forward", "fkl", "kl_forward")
REVERSE = ("reverse_kl", "reverse", "rkl", "kl_reverse")
CLEAR = 0.02  # both cosines are near each other where the student is sure of one token as well


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    teacher: Tensor = step.batch[step.roles["teacher"]]
    for option, modes in step.options.items():
        forward, reverse = (
            next((m for m in modes if isinstance(m, str) and m.lower().replace("-", "_") in names), None)
            for names in (FORWARD, REVERSE)
        )
        if forward is None or reverse is None or teacher.ndim < 3:
            continue
        sure, wanted = _sure(probe, teacher)
        if wanted is None:
            return
        knobs = {**step.terms_off, **step.pure}
        near, far = (probe.gradient(sure, {**knobs, option: mode}).cosine(wanted) for mode in (forward, reverse))
        yield LAW.finding(
            f"option {option}: {forward} and {reverse}",
            f"cosines {near:.2f} and {far:.2f} to the likelihood of a certain teacher's token", f"{forward} is nearer",
            near > far - CLEAR,
            f"{forward} is KL(teacher ‖ student), which for a certain teacher is the likelihood of its token. Here "
            f"{reverse} is that: the two are swapped, or the arguments of a KL function are.",
        )  # fmt: skip


def _sure(probe: Probe, teacher: Tensor) -> tuple[edits.Batch, Gradient | None]:
    """A batch whose teacher is certain of a token that the student finds unlikely, and that token's ∇NLL."""
    step, own = probe.step, probe.forward(probe.step.student)
    if own.shape != teacher.shape or not own.is_floating_point():
        return dict(step.batch), None
    far = opposite_teacher(teacher, own.detach())
    logs = own.log() if edits.probability_like(own.detach()) else own.log_softmax(-1)
    picked = logs.gather(-1, far.argmax(-1, keepdim=True))[..., 0]
    wanted = probe.pull(-(picked * edits.taken(step, picked)).sum())
    return {**step.batch, step.roles["teacher"]: far}, wanted


LAW = Law(
    "KL-DIRECTION", "KL direction", __doc__, check, quick=False, tier="contrib", perturbed=True,
    when=lambda step: "teacher" in step.roles and step.student is not None,
)  # fmt: skip

"""RT-SYNC: After a push the sampler's log-probs equal the trainer's, and follow a perturbation of all weights and of
each tensor.

Needs: perturb, push, trainer, sampler; precision where a program is coarser than its log-probs; undo to revert the
perturbation; model (and buffers) for each tensor, at one push per tensor
How: Log-probs of one text on both sides, before and after a perturbation. The tolerance is 64 units in the last place
of the coarsest dtype (at most ⅛), relative to a log-prob where it is above 1; after the perturbation it is at most an
eighth of it or four times the difference before it. A push does not change the trainer's own log-probs. When one tensor
is perturbed alone, at least half of the change must reach the sampler.
Exceptions: Two programs in 16 bits differ legitimately: declare precision. A perturbation that is smaller than their
difference is not judged. Without undo the trainer stays perturbed.
Detects: other tensors pushed than the trained ones, a stale adapter slot, prime-rl #2823 (a tied head that is a stale
clone), a base that drifts by merge and unmerge in bf16
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.law import Law
from earnest_audit.precision import rounding
from earnest_audit.restore import put_back
from earnest_audit.subjects.base import gap, largest, outputs
from earnest_audit.verdict import Finding

PERTURBATIONS = (0.1, 0.5, 2.0, 8.0, 32.0)  # of a tensor's own size
CLEAR = 8  # times what two programs differ by anyway: there a lost change differs from a rounded one
OWN = 64 * torch.finfo(torch.float32).eps  # the same program on the same weights gives the same, in any dtype


@dataclass
class WeightSync:
    """``perturb()`` perturbs the trainer, ``push()`` syncs, ``trainer()`` and ``sampler()`` give log-probs of one fixed
    text. ``undo()`` takes the perturbation back; without it the trainer stays perturbed.

    ``model`` is the trainer's module that a push sends: each of its trainable parameters, and of its buffers those
    whose names match ``buffers`` ("*.running_mean"), is then perturbed alone and pushed, and restored. Frozen ones need
    not be sent, nor buffers that no training moves."""

    perturb: Callable[[], None]
    push: Callable[[], Any]
    trainer: Callable[[], Tensor]
    sampler: Callable[[], Tensor]
    precision: torch.dtype | None = None  # of the coarser of the two programs, where it is coarser than its log-probs
    undo: Callable[[], Any] | None = None
    model: nn.Module | None = None
    buffers: Sequence[str] = ()

    def check(self) -> Iterator[Finding]:
        alone, again = outputs(self.trainer), outputs(self.trainer)
        self.push()
        before, now = outputs(self.sampler), outputs(self.trainer)
        room = rounding(before, now, precision=self.precision)
        yield LAW.agrees(
            "the trainer after a push", _difference(again, now), max(OWN, 4 * _difference(alone, again)),
            "A push changes the trainer: adapters are merged for the push and taken out again in 16 bits, which does "
            "not give the old weights back. Keep a copy, or merge into another one.",
            "its own log-probs moved by {}",
        )  # fmt: skip
        agree, different = _difference(before, now), "Sampler and trainer are different policies."
        yield LAW.agrees("sampler = trainer after a push", agree, room, different, "log-probs off by {}")
        self.perturb()
        moved = _difference(outputs(self.trainer), now)
        self.push()
        left = self._apart()
        follows = self._follows(agree, moved, left, room)
        each = self._each(max(agree, left)) if agree <= room and follows.outcome != "fails" else None
        if self.undo is not None:
            self.undo()
            self.push()
        yield follows
        if each is not None:
            yield each

    def _follows(self, agree: float, moved: float, left: float, room: float) -> Finding:
        """Two programs in 16 bits differ by up to ``room`` at some text; by how much at this one was measured before
        the perturbation. A perturbation that stands well above that can be judged by what it left over."""
        subject = "the sampler follows a perturbation"
        near = min(room, max(4 * agree, moved / 8))
        if agree <= room and moved <= 2 * near:
            return LAW.not_applicable(
                subject,
                f"the perturbation moved the trainer by {moved:.2g}, the two differ by {agree:.2g} without one",
                "The perturbation is too small to show whether a push arrives: perturb more strongly.",
            )
        stale = "The push did not reach the sampler: other tensors were sent, the adapter slot is stale, or a cache "
        return LAW.agrees(subject, left, near, f"{stale}answers.", f"{{}} after of {moved:.2g}")

    def _each(self, agree: float) -> Finding:
        """One tensor after the other, as far as it takes to stand out of what the two programs differ by anyway."""
        subject = "each tensor alone"
        if self.model is None:
            return LAW.not_declared(subject, "model=…, the trainer's module,")
        chosen: list[tuple[str, Tensor]] = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point() and any(fnmatch.fnmatchcase(name, b) for b in self.buffers):
                chosen.append((name, buffer))
        lost, hidden = [], []
        for name, tensor in chosen:
            with put_back([tensor]):
                moved = self._stands_out(tensor, agree)
                if moved is None:
                    hidden.append(name)
                    continue
                self.push()
                if not self._apart() <= moved / 2:
                    lost.append(name)
        self.push()
        shown = len(chosen) - len(hidden)
        aside = f" ({len(hidden)} do not show: {', '.join(hidden[:3])})" if hidden else ""
        if not shown:
            return LAW.not_applicable(subject, f"none of {len(chosen)} shows in the log-probs", "Give a longer text.")
        return LAW.finding(
            subject, f"{len(lost)} of {shown} do not arrive{aside}", "all arrive", not lost,
            f"{', '.join(lost[:3])}: changed alone, the sampler does not follow. The push does not send it, sends it "
            "under another name, or the sampler has a copy of its own (a tied head).",
        )  # fmt: skip

    def _stands_out(self, tensor: Tensor, agree: float) -> float | None:
        """What a perturbation moves the trainer's log-probs by; None where none stands out."""
        kept, base = tensor.detach().clone(), outputs(self.trainer)
        noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)).to(kept)
        size = float(kept.float().square().mean().sqrt()) or 1.0
        for factor in PERTURBATIONS:
            tensor.data.copy_(kept + factor * size * noise)
            moved = _difference(outputs(self.trainer), base)
            if max(CLEAR * agree, 16 * OWN) < moved < float("inf"):
                return moved
        return None

    def _apart(self) -> float:
        return _difference(outputs(self.sampler), outputs(self.trainer))


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two log-probs, over the larger of 1 and their size; equal infinities do not differ."""
    size = torch.maximum(a.abs(), b.abs()).clamp_min(1.0).nan_to_num(posinf=1.0)
    return largest(gap(a, b) / size)


LAW = Law("RT-SYNC", "weight sync (WeightSync)", __doc__, WeightSync.check)

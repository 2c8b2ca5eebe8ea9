"""Weights that are pushed to a sampler, thinned or gathered (averaged between replicas: ``outer``).

WeightSync  after a push, probe log-probs follow a deliberate perturbation
Unbiased    E[f(x)] = x, for every setting of a random thinning
Gather      what every rank sent is what every rank has
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest.audit.law import Law, not_declared
from earnest.audit.restore import seeded
from earnest.audit.subjects import outer
from earnest.audit.subjects.base import gap, judged, largest, rounding, unjudged
from earnest.audit.verdict import Finding

MANY = 12  # ranks: one more digit
ODD = (0.0, -100.0, -1.0)
PERTURBATIONS = (0.1, 0.5, 2.0, 8.0, 32.0)  # of a tensor's own size
CLEAR = 8  # times what two programs differ by anyway: what is lost is then told from what is rounded
OWN = 64 * torch.finfo(torch.float32).eps  # the same program on the same weights says the same, in any dtype


@dataclass
class WeightSync:
    """``kick()`` perturbs the trainer, ``push()`` syncs, ``trainer()`` and ``sampler()`` give log-probs of one fixed
    text. ``undo()`` takes the perturbation back; without it the trainer stays perturbed.

    ``model`` is the trainer's module that a push sends: each of its trainable parameters, and of its buffers those
    whose names match ``buffers`` ("*.running_mean"), is then perturbed alone and pushed, and restored. Frozen ones need
    not be sent, nor buffers that no training moves."""

    kick: Callable[[], None]
    push: Callable[[], Any]
    trainer: Callable[[], Tensor]
    sampler: Callable[[], Tensor]
    precision: torch.dtype | None = None  # of the coarser of the two programs, where it is coarser than its log-probs
    tolerance: float | None = None  # none: rounding in that precision
    undo: Callable[[], Any] | None = None
    model: nn.Module | None = None
    buffers: Sequence[str] = ()

    def check(self) -> Iterator[Finding]:
        alone, again = self._logprobs(self.trainer), self._logprobs(self.trainer)
        self.push()
        before, now = self._logprobs(self.sampler), self._logprobs(self.trainer)
        room = rounding(before, now, precision=self.precision) if self.tolerance is None else self.tolerance
        yield self._untouched(alone, again, now)
        agree = _difference(before, now)
        yield judged(
            "RT",
            "sampler = trainer after a push",
            f"log-probs off by {agree:.2g}",
            f"≤ {room:.1g}",
            agree <= room,
            "Sampler and trainer are different policies.",
        )
        self.kick()
        moved = _difference(self._logprobs(self.trainer), now)
        self.push()
        left = _difference(self._logprobs(self.sampler), self._logprobs(self.trainer))
        follows = self._follows(agree, moved, left, room)
        each = self._each(max(agree, left)) if agree <= room and follows.outcome != "fails" else None
        if self.undo is not None:
            self.undo()
            self.push()
        yield follows
        if each is not None:
            yield each

    def _untouched(self, alone: Tensor, again: Tensor, now: Tensor) -> Finding:
        noise, off = _difference(alone, again), _difference(again, now)
        room = max(OWN, 4 * noise)
        return judged(
            "RT",
            "the trainer after a push",
            f"its own log-probs moved by {off:.2g}",
            f"≤ {room:.1g}",
            off <= room,
            "A push changes the trainer: adapters are merged for the push and taken out again in 16 bits, which does "
            "not give the old weights back. Keep a copy, or merge into another one.",
        )

    def _follows(self, agree: float, moved: float, left: float, room: float) -> Finding:
        """Two programs in 16 bits differ by up to ``room`` at some text; by how much at this one was measured before
        the perturbation. A perturbation that stands well above that can be judged by what it left over."""
        subject = "the sampler follows a perturbation"
        near = room if self.tolerance is not None else min(room, max(4 * agree, moved / 8))
        if agree <= room and moved <= 2 * near:
            return unjudged(
                "RT", subject, f"the perturbation moved the trainer by {moved:.2g}, the two differ by {agree:.2g} "
                "without one",
                "The perturbation is too small to tell a push that arrives from one that does not: perturb more "
                "strongly.",
            )  # fmt: skip
        return judged(
            "RT",
            subject,
            f"{left:.2g} after of {moved:.2g}",
            f"≤ {near:.1g}",
            left <= near,
            "The push did not reach the sampler: other tensors were sent, the adapter slot is stale, or a cache "
            "answers.",
        )

    def _each(self, agree: float) -> Finding:
        """One tensor after the other, as hard as it takes to stand out of what the two programs differ by anyway."""
        subject = "each tensor alone"
        if self.model is None:
            return not_declared("RT", subject, "model=…, the trainer's module,")
        chosen: list[tuple[str, Tensor]] = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point() and any(fnmatch.fnmatchcase(name, b) for b in self.buffers):
                chosen.append((name, buffer))
        lost, mute = [], []
        for name, tensor in chosen:
            kept = tensor.detach().clone()
            try:
                moved = self._stands_out(tensor, kept, agree)
                if moved is None:
                    mute.append(name)
                    continue
                self.push()
                left = _difference(self._logprobs(self.sampler), self._logprobs(self.trainer))
                if not left <= moved / 2:
                    lost.append(name)
            finally:
                with torch.no_grad():
                    tensor.copy_(kept)
        self.push()
        told = len(chosen) - len(mute)
        quiet = f" ({len(mute)} do not show: {', '.join(mute[:3])})" if mute else ""
        if not told:
            return unjudged("RT", subject, f"none of {len(chosen)} shows in the log-probs", "Give a longer text.")
        return judged(
            "RT", subject, f"{len(lost)} of {told} do not arrive{quiet}", "all arrive", not lost,
            f"{', '.join(lost[:3])}: changed alone, the sampler does not follow. The push does not send it, sends it "
            "under another name, or the sampler has a copy of its own (a tied head).",
        )  # fmt: skip

    def _stands_out(self, tensor: Tensor, kept: Tensor, agree: float) -> float | None:
        """What a perturbation moves the trainer's log-probs by; None where none stands out."""
        with torch.no_grad():
            base = self._logprobs(self.trainer)
            rng = torch.Generator().manual_seed(0)
            noise = torch.randn(kept.shape, generator=rng).to(kept)
            size = float(kept.float().square().mean().sqrt()) or 1.0
            for factor in PERTURBATIONS:
                tensor.copy_(kept + factor * size * noise)
                moved = _difference(self._logprobs(self.trainer), base)
                if max(CLEAR * agree, 16 * OWN) < moved < float("inf"):
                    return moved
        return None

    def _logprobs(self, who: Callable[[], Tensor]) -> Tensor:
        return who().detach().clone()


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two log-probs, over the larger of 1 and their size; equal infinities do not differ."""
    a, b = a.to(torch.promote_types(a.dtype, b.dtype)), b.to(torch.promote_types(a.dtype, b.dtype))
    size = torch.maximum(a.abs(), b.abs()).clamp_min(1.0)
    return largest(torch.where(a == b, torch.zeros_like(size), gap(a, b) / size))


@dataclass
class Unbiased:
    """``fn(x, setting)`` thins or rounds x at random; its mean over many draws is x at every setting."""

    fn: Callable[[Tensor, float], Tensor]
    settings: Sequence[float] = (0.3, 0.7)
    draws: int = 2000

    def check(self) -> Iterator[Finding]:
        x = torch.linspace(-2, 3, 11) * 1.0037 + 0.0019  # no dtype of 16 bits holds these
        for setting in self.settings:
            with seeded(0):
                drawn = [self.fn(x.clone(), setting) for _ in range(self.draws)]
            total = torch.stack(drawn).double()
            mean, spread = total.mean(0), total.std(0) / self.draws**0.5
            # Rounding to nearest, where the result has fewer bits than the input, is no bias of the draw.
            grain = torch.finfo(drawn[0].dtype).eps / 2 if drawn[0].is_floating_point() else 0.0
            off = float(((mean - x).abs() / (6 * spread + x.abs() * grain + 1e-6)).max())
            yield judged(
                "UNBIASED",
                f"mean at {setting}",
                f"{off:.2g} × six standard errors from the input",
                "≤ 1",
                off <= 1.0,
                "The mean is not the input: survivors are not rescaled (a result that is discarded?), or a stochastic "
                "rounding has no noise and truncates.",
            )


@dataclass
class Gather:
    """``gather(values)`` simulates ranks that send one tensor each, as many as there are values, and returns what a
    rank receives. ``ragged`` where ranks may send different lengths. ``padding``: a value that no rank ever sends, and
    that may be taken for padding; without it every value must arrive."""

    gather: Callable[[list[Tensor]], Sequence[Tensor]]
    ranks: int = 3
    ragged: bool = False
    padding: float | None = None

    def check(self) -> Iterator[Finding]:
        plain = self._row("ranks", self._counted([3] * self.ranks))
        yield plain
        if self.ragged:
            yield self._row("ranks of different lengths", self._counted([rank + 2 for rank in range(self.ranks)]))
        else:
            yield not_declared("RT", "ranks of different lengths", "ragged=True, where ranks may send them,")
        if plain.outcome == "holds":
            yield self._row("values such as 0 and -100", self._odd())
        if plain.outcome == "holds" and self.ranks < MANY:
            yield self._many()

    def _counted(self, lengths: Sequence[int]) -> list[Tensor]:
        return [torch.arange(n, dtype=torch.float32) + 10 * (rank + 1) for rank, n in enumerate(lengths)]

    def _odd(self) -> list[Tensor]:
        """What is often taken for padding, in front and at the end; one rank sends nothing else."""
        odd = [v for v in ODD if v != self.padding]
        sent = []
        for rank in range(self.ranks):
            value, other = odd[rank % len(odd)], odd[(rank + 1) % len(odd)]
            sent.append(torch.tensor([value, 7.0 + rank, other] if rank else [value] * 3))
        return sent

    def _many(self) -> Finding:
        """So many that names of ranks are in another order as texts: rank10 stands before rank2."""
        subject, sent = f"{MANY} ranks", self._counted([3] * MANY)
        try:
            got = list(self.gather([t.clone() for t in sent]))
        except Exception as error:
            return unjudged("RT", subject, f"raises {type(error).__name__}", "It simulates another number of ranks.")
        if len(got) != MANY:
            return unjudged("RT", subject, f"{len(got)} came back", "It simulates another number of ranks.")
        return self._row(subject, sent)

    def _row(self, subject: str, sent: Sequence[Tensor]) -> Finding:
        got = [t.flatten().tolist() for t in self.gather([t.clone() for t in sent])]
        wanted = [t.tolist() for t in sent]
        return judged(
            "RT",
            subject,
            f"{got}",
            f"{wanted}",
            got == wanted,
            "A rank does not have what every rank sent: all slots are one tensor, the order is lost (rank10 before "
            "rank2), padding is not cut off again, or what looks like padding is.",
        )


LAWS = (
    Law(
        code="RT",
        name="weight sync (WeightSync)",
        sentence="After a push the sampler's log-probs equal the trainer's, and follow a perturbation of all weights "
        "and of each tensor.",
        needs="kick, push, trainer, sampler; precision where a program is coarser than its log-probs; undo to revert "
        "the perturbation; model (and buffers) for each tensor, at one push per tensor",
        how="Log-probs of one text on both sides, before and after a perturbation. The tolerance is 64 units in the "
        "last place of the coarsest dtype (at most ⅛), relative to a log-prob where it is above 1; after the "
        "perturbation it is at most an eighth of it or four times the difference before it. A push does not change "
        "the trainer's own log-probs. When one tensor is perturbed alone, at least half of the change must reach the "
        "sampler.",
        traps="Two programs in 16 bits differ legitimately: declare precision. A perturbation that is smaller than "
        "their difference is not judged. Without undo the trainer stays perturbed.",
        caught="other tensors pushed than the trained ones, a stale adapter slot, prime-rl #2823 (a tied head that is "
        "a stale clone), a base that drifts by merge and unmerge in bf16",
        check=WeightSync.check,
    ),
    outer.LAW,
    Law(
        code="UNBIASED",
        name="thinning (Unbiased)",
        sentence="The mean of a random thinning is its input, at every setting.",
        needs="fn(x, setting)",
        how="Many draws of numbers that 16 bits cannot hold; within six standard errors.",
        traps="Six standard errors of 22 numbers: one false alarm in about twenty million audits.",
        caught="PEFT #3152 (DARE's rescaling is computed and discarded), OneTrainer #994 (stochastic rounding that "
        "truncates)",
        check=Unbiased.check,
    ),
    Law(
        code="RT",
        name="gather (Gather)",
        sentence="Every rank receives what every rank sent.",
        needs="gather(values); ragged=True where ranks may send different lengths; padding where a value is never sent",
        how="Every rank sends its own numbers, then 0, -1 and -100; then twelve ranks do; everything received is "
        "compared.",
        traps="Padding that is not removed is checked only where ragged is declared, or lengths are equal.",
        caught="all_gather into [t] * world_size, buckets that are not cut back",
        check=Gather.check,
    ),
)

"""Several processes: a trainer and its samplers, and ranks that gather, draw and log."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.precision import rounding
from earnest_audit.restore import perturbed
from earnest_audit.subjects.base import Subject, difference, equal, outputs
from earnest_audit.verdict import Finding

PERTURBATIONS = (0.1, 0.5, 2.0, 8.0, 32.0)  # of a tensor's own size
CLEAR = 8  # times what two programs differ by anyway: there a lost change differs from a rounded one
OWN = 64 * torch.finfo(torch.float32).eps  # the same program on the same weights gives the same, in any dtype
OTHERWISE = "their log-probs are not of one distribution: another temperature, top-p or top-k, or raw ones."
RANKS, STEPS, MANY = 4, 3, 12  # MANY: ranks with one more digit
ODD = (0.0, -100.0, -1.0)


@dataclass
class WeightSync(Subject, name="weight sync"):
    """RT-SYNC: After a push the sampler's log-probs equal the trainer's, and follow a perturbation of all weights and
    of each tensor.

    Needs: ``perturb()`` perturbs the trainer, ``push()`` syncs, ``trainer()`` and ``sampler()`` give log-probs of one
    fixed text. ``undo()`` takes the perturbation back; without it the trainer stays perturbed. ``model`` is the
    trainer's module that a push sends: each of its trainable parameters, and of its buffers those whose names match
    ``buffers`` ("*.running_mean"), is then perturbed alone and pushed, and restored.
    How: Log-probs of one text on both sides, before and after a perturbation. The tolerance is 64 units in the last
    place of the coarsest dtype (at most ⅛), relative to a log-prob where it is above 1; after the perturbation it is at
    most an eighth of it or four times the difference before it. A push does not change the trainer's own log-probs.
    When one tensor is perturbed alone, at least half of the change must reach the sampler.
    Exceptions: Two programs in 16 bits differ legitimately: declare precision. A smaller perturbation is not judged.
    Detects: tensors that are not pushed, a stale adapter slot, prime-rl #2823 (a tied head is a stale clone), a base
    that drifts by merge and unmerge in bf16
    """

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
        why = "A push changes the trainer: adapters are merged and taken out again in 16 bits. Keep a copy."
        own, near = difference(again, now), max(OWN, 4 * difference(alone, again))
        yield self.agrees("the trainer after a push", own, near, why, "its own log-probs moved by {}")
        agree, different = difference(before, now), f"Sampler and trainer are different policies, or {OTHERWISE}"
        yield self.agrees("sampler = trainer after a push", agree, room, different, "log-probs off by {}")
        self.perturb()
        far = difference(outputs(self.trainer), now)
        self.push()
        left, by = self._apart(), difference(outputs(self.sampler), before)
        rows = [self._follows(agree, far, left, room, by)]
        if agree <= room and rows[0].outcome != "fails":
            rows.append(self._each(max(agree, left)))
        if self.undo is not None:
            self.undo()
            self.push()
        yield from rows

    def _follows(self, agree: float, far: float, left: float, room: float, by: float) -> Finding:
        """Two programs in 16 bits differ by up to ``room`` at some text; by how much at this one was measured before
        the perturbation. A perturbation that stands well above that can be judged by what it left over."""
        subject = "the sampler follows a perturbation"
        near = min(room, max(4 * agree, far / 8))
        if agree <= room and far <= 2 * near:
            measured = f"the perturbation moved the trainer by {far:.2g}, the two differ by {agree:.2g} without one"
            why = "The perturbation is too small to show whether a push arrives: perturb more strongly."
            return self.not_applicable(subject, measured, why)
        why = "The push did not reach the sampler: other tensors were sent, an adapter slot is stale, a cache answers."
        if by > near:
            why = f"The sampler moved, but to other log-probs: some tensors are not sent or misplaced, or {OTHERWISE}"
        measured = f"off by {{}} (the trainer moved by {far:.2g}, the sampler by {by:.2g})"
        return self.agrees(subject, left, near, why, measured)

    def _each(self, agree: float) -> Finding:
        """One tensor after the other, as far as it takes to stand out of what the two programs differ by anyway."""
        subject = "each tensor alone"
        if self.model is None:
            return self.not_declared(subject, "model=…, the trainer's module,")
        chosen: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point() and any(fnmatch.fnmatchcase(name, b) for b in self.buffers):
                chosen[name] = buffer
        lost, hidden = list[str](), list[str]()
        for name, tensor in chosen.items():
            base = outputs(self.trainer)
            for size in PERTURBATIONS:
                with perturbed([tensor], size):
                    far = difference(outputs(self.trainer), base)
                    if max(CLEAR * agree, 16 * OWN) < far < float("inf"):  # it stands out
                        self.push()
                        lost += [] if self._apart() <= far / 2 else [name]
                        break
            else:
                hidden.append(name)
        self.push()
        shown = len(chosen) - len(hidden)
        if not shown:
            return self.not_applicable(subject, f"none of {len(chosen)} shows in the log-probs", "Give a longer text.")
        aside = f" ({len(hidden)} do not show: {', '.join(hidden[:3])})" if hidden else ""
        why = ": the sampler does not follow: it is not sent, or misnamed, or the sampler has a copy (a tied head)."
        return self.none(subject, lost, f"{len(lost)} of {shown} do not arrive{aside}", why)

    def _apart(self) -> float:
        return difference(outputs(self.sampler), outputs(self.trainer))


@dataclass
class Gather(Subject, name="gather"):
    """RT-GATHER: Every rank receives what every rank sent.

    Needs: ``gather(values)`` simulates ranks that send one tensor each, and returns what a rank receives. ``ragged``
    where ranks may send different lengths. ``padding``: a value that no rank ever sends.
    How: Every rank sends its own numbers, then 0, -1 and -100; then twelve ranks do; everything received is compared.
    Exceptions: Padding that is not removed is checked only where ragged is declared, or lengths are equal.
    Detects: all_gather into [t] * world_size, buckets that are not cut back
    """

    gather: Callable[[list[Tensor]], Sequence[Tensor]]
    ranks: int = 3
    ragged: bool = False
    padding: float | None = None

    def check(self) -> Iterator[Finding]:
        yield (plain := self._row("ranks", self._counted([3] * self.ranks)))
        if self.ragged:
            yield self._row("ranks of different lengths", self._counted([rank + 2 for rank in range(self.ranks)]))
        else:
            yield self.not_declared("ranks of different lengths", "ragged=True, where ranks may send them,")
        if plain.outcome == "holds":
            yield self._row("values such as 0 and -100", self._odd())
        if plain.outcome == "holds" and self.ranks < MANY:
            yield self._many()

    def _counted(self, lengths: Sequence[int]) -> list[Tensor]:
        return [torch.arange(n, dtype=torch.float32) + 10 * (rank + 1) for rank, n in enumerate(lengths)]

    def _odd(self) -> list[Tensor]:
        """What is often taken for padding, in front and at the end; one rank sends nothing else."""
        odd, sent = [v for v in ODD if v != self.padding], list[Tensor]()
        for rank in range(self.ranks):
            first, last = odd[rank % len(odd)], odd[(rank + 1) % len(odd)]
            sent.append(torch.tensor([first, 7.0 + rank, last] if rank else [first] * 3))
        return sent

    def _many(self) -> Finding:
        """At least 11 ranks, so that their names sort differently as texts: rank10 before rank2."""
        subject, sent, why = f"{MANY} ranks", self._counted([3] * MANY), "It simulates another number of ranks."
        try:
            came = len(list(self.gather([t.clone() for t in sent])))
        except Exception as error:
            return self.not_applicable(subject, f"raises {type(error).__name__}", why)
        return self._row(subject, sent) if came == MANY else self.not_applicable(subject, f"{came} came back", why)

    def _row(self, subject: str, sent: Sequence[Tensor]) -> Finding:
        got = [t.flatten().tolist() for t in self.gather([t.clone() for t in sent])]
        wanted = [t.tolist() for t in sent]
        why = "A slot is not what its rank sent: all are one tensor, the order is lost, or padding is cut wrongly."
        return self.finding(subject, f"{got}", f"{wanted}", got == wanted, why)


@dataclass
class Ranks(Subject, name="ranks"):
    """RANKS: Ranks draw different numbers, each repeatably; a metric over ranks does not depend on how rows are cut.

    seeds     draw(rank) differs between ranks (and steps), and is the same when it is made again
    metrics   the metric of all rows is that of the same rows in other, uneven shards, and what one process computes

    Needs: ``draw(rank)``, or ``draw(rank, step)``, gives what a rank samples (ids, noise): so much of it that no two
    draws are equal by chance. ``metric(shards)`` is the number that is logged for shards, one tensor of rows per rank;
    ``rows`` [N, …] are such rows, of unequal size in their sum. ``single(shards)`` is the metric by its definition, in
    one process. ``by_rank=True`` where it depends on the cut by its definition: then only ``single`` is compared.
    How: Four ranks draw (in three steps), twice; the rows are cut into one, two and three uneven shards.
    Exceptions: A sampler that gives all ranks the same draws on purpose (data that is split afterwards) has no draw.
    Detects: one seed for all ranks, seed + rank + step, a mean of the ranks' means, TRL #7100 and #5620
    """

    draw: Callable[..., Tensor] | None = None
    metric: Callable[[list[Tensor]], float] | None = None
    rows: Tensor | None = None
    single: Callable[[list[Tensor]], float] | None = None
    by_rank: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draw is None and self.metric is None:
            raise self.error("", "nothing is declared: give draw=…, or metric=… with rows=…")

    def check(self) -> Iterator[Finding]:
        if self.draw is not None:
            yield from self._seeds(self.draw)
        if self.metric is not None and self.rows is not None:
            yield from self._cuts(self.metric, self.rows)
        elif self.metric is not None:
            yield self.not_declared("a metric over ranks", "rows=…")

    def _seeds(self, draw: Callable[..., Tensor]) -> Iterator[Finding]:
        required = [p for p in inspect.signature(draw).parameters.values() if p.default is p.empty]
        places: dict[str, tuple[int, ...]] = {f"rank {rank}": (rank,) for rank in range(RANKS)}
        if sum(p.kind < p.VAR_POSITIONAL for p in required) == 2:
            places = {f"rank {r} in step {s}": (r, s) for r, s in product(range(RANKS), range(STEPS))}
        drawn, again = ({name: draw(*at).detach().clone() for name, at in places.items()} for _ in range(2))
        alike = [f"{a} and {b}" for a, b in combinations(places, 2) if equal(drawn[a], drawn[b])]
        more = " draw the same: their generators have one seed, and the samples of one are repeated by the other."
        yield self.none("different ranks", alike, f"{len(alike)} pairs draw the same", more)
        other = [name for name in places if not equal(drawn[name], again[name])]
        more = " draws something else the second time: its seed is not the only thing that it depends on."
        yield self.none("the same rank again", other, f"{len(other)} of {len(places)} differ", more)

    def _cuts(self, metric: Callable[[list[Tensor]], float], rows: Tensor) -> Iterator[Finding]:
        n, few = len(rows), max(1, len(rows) // 4)
        cuts = [cut for cut in ([n], [few, n - few], [few, few + 1, n - 2 * few - 1]) if min(cut) > 0]
        named = ["+".join(map(str, cut)) for cut in cuts]
        values = [float(metric([part.clone() for part in rows.split(cut)])) for cut in cuts]
        room = max(1e-5, rounding(rows) if rows.is_floating_point() else 0.0)
        if self.single is not None:
            own = [float(self.single([part.clone() for part in rows.split(cut)])) for cut in cuts]
            off = [abs(a - b) / max(1e-12, abs(a), abs(b)) for a, b in zip(values, own, strict=True)]
            worst = off.index(max(off))
            measured = f"rows cut {named[worst]}: {values[worst]:.4g} and {own[worst]:.4g}, relatively off by {{}}"
            why = "One process computes another number: a token counts on several ranks, or a weight is applied twice."
            yield self.agrees("the metric in one process", off[worst], room, why, measured)
        if not self.by_rank:
            each = ", ".join(f"{value:.4g} ({cut})" for value, cut in zip(values, named, strict=True))
            off_by = (max(values) - min(values)) / max(1e-12, *map(abs, values))
            why = "It depends on how rows are cut: a mean of means, an averaged maximum, or the first rank's alone."
            yield self.agrees("a metric over ranks", off_by, room, why, f"{each}: relatively off by {{}}")

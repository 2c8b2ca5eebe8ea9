"""RT-RESUME: 2N steps equal N steps, a save, a load and N steps, bit for bit, the next data included.

Needs: make, run, save, load, state
How: Both runs, their states and their data are compared; each begins from the same seed. The checkpoint is loaded again
after the saved run has continued.
Exceptions: Other thread counts sum in another order: resume with the same number. State that changes at an epoch's end
shows only in runs of more than one epoch; the verdict notes where none ended.
Detects: moments, schedules, random states or data streams that restart
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import gap, largest
from earnest_audit.subjects.round_trip import FOLLOWS, load_onto
from earnest_audit.verdict import Finding


@dataclass
class Resume:
    """``run(x, n)`` trains n steps and returns the ids of the data that it saw; ``state(x)`` is everything that is
    trained, averages of weights included. ``save(x, folder)`` and ``load(x, folder)`` are given a folder (a ``Path``
    that exists and is empty) and name the files in it themselves; ``load`` fills the ``x`` that it is given, or
    returns another. Both runs and the resumed one start from one state of the generators."""

    make: Callable[[], Any]
    run: Callable[[Any, int], list[Any]]
    save: Callable[[Any, Path], Any]
    load: Callable[[Any, Path], Any]
    state: Callable[[Any], Tensor]
    steps: int = 3
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        with seeded(self.seed):
            straight = self.make()
            seen = [*self.run(straight, self.steps), *self.run(straight, self.steps)]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with seeded(self.seed):
                first = self.make()
                seen_first = self.run(first, self.steps)
                self.save(first, folder)
            with seeded(self.seed):  # a new process begins from the seed again; what went on in between it must load
                second = load_onto(self.make(), self.load, folder)
                loaded = self.state(second).detach().clone()
                seen_second = self.run(second, self.steps)
            follows = list(self._follows(first, folder, loaded))
        yield self._equal(
            f"{2 * self.steps} steps = {self.steps} + resume + {self.steps}", self.state(straight), self.state(second),
            "A resumed run is another run: optimizer moments, a schedule, a random state or a term's state starts "
            "afresh.",
        )  # fmt: skip
        wanted = seen[len(seen_first) :]
        why = "The data stream starts again, or skips, after a resume."
        yield LAW.finding("the data after a resume", f"{seen_second[:3]}", f"{wanted[:3]}", seen_second == wanted, why)
        yield from follows
        if len(set(map(repr, seen))) == len(seen):
            why = "A shuffle that is not restored shows only after an epoch: give steps=… of an epoch or more."
            yield LAW.not_applicable("the end of an epoch", f"no datum came twice in {2 * self.steps} steps", why)

    def _equal(self, subject: str, a: Tensor, b: Tensor, meaning: str) -> Finding:
        off = largest(gap(a.double(), b.double()))
        return LAW.finding(subject, f"off by {off:.2g}", "bit-equal", torch.equal(a, b), meaning)

    def _follows(self, first: Any, folder: Path, loaded: Tensor) -> Iterator[Finding]:
        """The saved run goes on, and the same folder is loaded again."""
        before = self.state(first).detach().clone()
        try:
            with seeded(self.seed):
                self.run(first, self.steps)
            with seeded(self.seed):
                third = load_onto(self.make(), self.load, folder)
        except Exception:  # a run that was ended by its save, a folder that is loaded once
            return
        if not torch.equal(self.state(first), before):
            yield self._equal("load, after the saved run went on", self.state(third).detach(), loaded, FOLLOWS)


LAW = Law("RT-RESUME", "resume (Resume)", __doc__, Resume.check)

"""FIRST-CALL: What is filled at a first call does not depend on when that is: a reference is the same before and after
training, and a cache follows what it was made from.

constant   a call after training = a call before it, also where it is the first one
follows    after training, a call = the first call of an object that was never called before
process    two fresh objects give the same

Needs: make, call, train; constant=False for a cache of something that is trained
How: Four fresh objects: one is called, trained and called again; one is trained and then called for the first time.
Exceptions: What is random must be seeded in make: fresh objects that differ by themselves are reported and not judged.
Detects: a reference that is copied from the policy at its first use, merged weights or masks that are cached and never
made anew, a reference that differs in a new process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import gap, largest, outputs, same
from earnest_audit.verdict import Finding


@dataclass
class FirstCall:
    """``make()`` gives an object as a new process would have it, ``train(x)`` changes what is trained, ``call(x)`` is
    what may be filled lazily: the reference's log-probs, outputs that use a cache. ``constant=False`` where it has to
    follow the training."""

    make: Callable[[], Any]
    call: Callable[[Any], Tensor]
    train: Callable[[Any], Any]
    constant: bool = True
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        warm, cold = self._make(), self._make()
        before, fresh = self._call(warm), self._call(self._make())
        other = "Two fresh objects differ: a new process begins from something else (an unseeded draw, a changed file)."
        yield same(LAW, "two fresh objects", before, fresh, other)
        self.train(warm)
        self.train(cold)
        later, first = self._call(warm), self._call(cold)
        if self.constant:
            why = "It changes with the training: it shares weights with what is trained."
            yield same(LAW, "after training", before, later, why)
            why = "Called for the first time after training it is another one: it is filled lazily, from the policy."
            yield same(LAW, "first called after training", before, first, why)
            return
        moved = largest(gap(first, before))
        why = "Training does not change what is called at all, so a cache that is never made anew would pass."
        yield LAW.finding("the training", f"moved it by {moved:.2g}", "above 0", moved > 0, why)
        stale = "After training the old value is given: what was cached at the first call is not made anew."
        yield same(LAW, "called before and after training", first, later, stale)

    def _make(self) -> Any:
        with seeded(self.seed):
            return self.make()

    def _call(self, x: Any) -> Tensor:
        with seeded(self.seed):
            return outputs(self.call, x)


LAW = Law("FIRST-CALL", "first call (FirstCall)", __doc__, FirstCall.check)

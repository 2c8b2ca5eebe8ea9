"""What is saved is what comes back, and a run that was interrupted is the run that was not.

RoundTrip   load(save(x)) gives the same outputs, from a kicked state, onto something else
Resume      2N steps = N steps, save, load, N steps; bit for bit, the next batch included
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from earnest.audit.law import Law
from earnest.audit.subjects.base import judged
from earnest.audit.verdict import Finding


@dataclass
class RoundTrip:
    """``make()`` gives a fresh object, ``kick(x)`` moves it away from birth, ``outputs(x)`` is what must survive."""

    make: Callable[[], Any]
    kick: Callable[[Any], None]
    save: Callable[[Any, Path], Any]
    load: Callable[[Any, Path], Any]
    outputs: Callable[[Any], Tensor]
    tolerance: float = 0.0

    def check(self) -> Iterator[Finding]:
        born, kicked = self.make(), self.make()
        self.kick(kicked)
        with torch.no_grad():
            birth, wanted = self.outputs(born).clone(), self.outputs(kicked).clone()
        moved = float((wanted - birth).abs().max())
        yield judged(
            "MU",
            "the kick",
            f"moved the outputs by {moved:.2g}",
            "above 0",
            moved > 0,
            "The kick changes nothing, so a save that loses everything would pass.",
        )
        with tempfile.TemporaryDirectory() as folder:
            self.save(kicked, Path(folder))
            loaded = self.make()
            given = self.load(loaded, Path(folder))
            loaded = loaded if given is None else given
            with torch.no_grad():
                found = self.outputs(loaded)
        off = float((found - wanted).abs().max())
        yield judged(
            "RT",
            "save → load",
            f"outputs off by {off:.2g} (lost everything: {moved:.2g})",
            f"≤ {self.tolerance:g}",
            off <= self.tolerance,
            "What is loaded is not what was saved: keys are missing or ignored, a tensor is re-initialised, or "
            "something that matters is not saved.",
        )


@dataclass
class Resume:
    """``run(x, n)`` trains n steps and returns the ids of the data that it saw; ``state(x)`` is everything that is
    trained."""

    make: Callable[[], Any]
    run: Callable[[Any, int], list[Any]]
    save: Callable[[Any, Path], Any]
    load: Callable[[Any, Path], Any]
    state: Callable[[Any], Tensor]
    steps: int = 3

    def check(self) -> Iterator[Finding]:
        straight = self.make()
        seen = [*self.run(straight, self.steps), *self.run(straight, self.steps)]
        first = self.make()
        seen_first = self.run(first, self.steps)
        with tempfile.TemporaryDirectory() as folder:
            self.save(first, Path(folder))
            second = self.make()
            given = self.load(second, Path(folder))
            second = second if given is None else given
        seen_second = self.run(second, self.steps)
        equal = torch.equal(self.state(straight), self.state(second))
        off = float((self.state(straight).double() - self.state(second).double()).abs().max())
        yield judged(
            "RT",
            f"{2 * self.steps} steps = {self.steps} + resume + {self.steps}",
            f"off by {off:.2g}",
            "bit-equal",
            equal,
            "A resumed run is another run: optimizer moments, a schedule, a random state or a term's state starts "
            "afresh.",
        )
        yield judged(
            "RT",
            "the data after a resume",
            f"{seen_second[:3]}",
            f"{seen[len(seen_first) :][:3]}",
            seen_second == seen[len(seen_first) :],
            "The data stream starts again, or skips, after a resume.",
        )


LAWS = (
    Law(
        code="RT",
        name="save and load (RoundTrip)",
        sentence="What is loaded is what was saved.",
        needs="make, kick, save, load, outputs",
        how="Saved from a kicked state, loaded onto a fresh object, outputs compared; that the kick moved the outputs "
        "is checked as MU.",
        traps="From birth a save that loses everything passes, hence the kick.",
        caught="an empty state dict, keys that are ignored, a tensor that is made anew",
        check=RoundTrip.check,
    ),
    Law(
        code="RT",
        name="resume (Resume)",
        sentence="2N steps are N steps, a save, a load and N steps, bit for bit, the next data included.",
        needs="make, run, save, load, state",
        how="Both runs, their states and the data that they saw are compared.",
        traps="Other thread counts sum in another order: resume on the same number.",
        caught="moments, schedules, random states or data streams that start afresh",
        check=Resume.check,
    ),
)

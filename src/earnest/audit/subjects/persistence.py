"""What is loaded is what was saved, and a resumed run equals an uninterrupted one.

RoundTrip   load(save(x)) gives the same outputs, from a perturbed state, onto something else
Resume      2N steps = N steps, save, load, N steps; bit for bit, the next batch included
both        what was saved does not change when training continues
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from earnest.audit.law import Law
from earnest.audit.restore import seeded
from earnest.audit.subjects.base import gap, judged, largest, unjudged
from earnest.audit.verdict import Finding

FOLLOWS = (
    "What was saved changes when training goes on: the save holds the live tensors (a state_dict() that is not copied, "
    "a write that is still under way), and gives back what came later."
)


@dataclass
class RoundTrip:
    """``make()`` gives a fresh object, ``kick(x)`` perturbs it, ``outputs(x)`` is what must survive.
    ``save(x, folder)`` and ``load(x, folder)`` are given a folder (a ``Path`` that exists and is empty) and name the
    files in it themselves; ``load`` fills the ``x`` that it is given, or returns another.

    Of modules, what is trainable, the dtypes and which tensors are one must survive too; ``for_training=False`` where
    ``load`` is for inference, and freezes or casts by design.
    """

    make: Callable[[], Any]
    kick: Callable[[Any], None]
    save: Callable[[Any, Path], Any]
    load: Callable[[Any, Path], Any]
    outputs: Callable[[Any], Tensor]
    tolerance: float = 0.0
    for_training: bool = True

    def check(self) -> Iterator[Finding]:
        born, kicked = self.make(), self.make()
        self.kick(kicked)
        with torch.no_grad():
            birth, wanted = self.outputs(born).clone(), self.outputs(kicked).clone()
        moved = largest(gap(wanted, birth))
        yield judged(
            "MU",
            "the perturbation",
            f"moved the outputs by {moved:.2g}",
            "above 0",
            moved > 0,
            "The perturbation changes nothing, so a save that loses everything would pass.",
        )
        with tempfile.TemporaryDirectory() as folder:
            self.save(kicked, Path(folder))
            loaded = self.make()
            loaded = _which(loaded, self.load(loaded, Path(folder)))
            with torch.no_grad():
                found = self.outputs(loaded).clone()
            follows = list(self._follows(kicked, Path(folder), wanted, found))
        off = largest(gap(found, wanted))
        yield judged(
            "RT",
            "save → load",
            f"outputs off by {off:.2g} (lost everything: {moved:.2g})",
            f"≤ {self.tolerance:g}",
            off <= self.tolerance,
            "What is loaded is not what was saved: keys are missing or ignored, a tensor is re-initialised, or "
            "something that matters is not saved.",
        )
        if off <= self.tolerance:
            yield from follows
        if self.for_training and isinstance(kicked, nn.Module) and isinstance(loaded, nn.Module):
            yield from _structure(kicked, loaded)

    def _follows(self, kicked: Any, folder: Path, wanted: Tensor, found: Tensor) -> Iterator[Finding]:
        """Training goes on after a save: another perturbation of what was saved, and the same folder is loaded
        again."""
        try:
            self.kick(kicked)
            loaded = self.make()
            loaded = _which(loaded, self.load(loaded, folder))
        except Exception:  # a perturbation or a load that is for once only
            return
        with torch.no_grad():
            live, again = self.outputs(kicked), self.outputs(loaded)
        moved = largest(gap(live, wanted))
        if moved <= self.tolerance:
            return
        off = largest(gap(again, found))
        yield judged(
            "RT", "load, after the saved one went on", f"outputs off by {off:.2g} (it went on by {moved:.2g})",
            f"≤ {self.tolerance:g}", off <= self.tolerance, FOLLOWS,
        )  # fmt: skip


def _which(made: Any, given: Any) -> Any:
    """What a load has loaded: what it returns, where that is such an object; else what it was handed. Reports, such as
    that of ``load_state_dict``, are no such object."""
    if isinstance(given, (type(made), nn.Module)):
        return given
    report = given is None or isinstance(given, tuple | list | Mapping | str | int | float)
    return made if report else given


def _structure(saved: nn.Module, loaded: nn.Module) -> Iterator[Finding]:
    """What outputs do not show and the next step does: frozen parameters, other dtypes, ties that are undone."""
    mine, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (saved, loaded))
    names = [n for n in mine if n in theirs]
    if not names:
        yield unjudged("RT", "what is trainable", "no names in common", "Parameters have other names after the load.")
        return
    flags = [n for n in names if mine[n].requires_grad != theirs[n].requires_grad]
    types = [n for n in names if mine[n].dtype != theirs[n].dtype]
    ties = [n for n, first in _first(mine, names).items() if _first(theirs, names)[n] != first]
    for subject, wrong, meaning in (
        ("what is trainable", flags, "are frozen (or not) after the load, unlike before the save: a resumed run trains "
         "another set. A load for inference declares for_training=False"),
        ("dtypes", types, "have another dtype after the load"),
        ("tied parameters", ties, "were one tensor and are two after the load, or the other way round: they drift "
         "apart with the first update"),
    ):  # fmt: skip
        text = f"{', '.join(wrong[:3])} {meaning}."
        yield judged("RT", subject, f"{len(wrong)} of {len(names)} differ", "none", not wrong, text)


def _first(parameters: Mapping[str, nn.Parameter], names: list[str]) -> dict[str, str]:
    """name -> the first name of the same tensor."""
    seen: dict[int, str] = {}
    return {n: seen.setdefault(id(parameters[n]), n) for n in names}


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
        with tempfile.TemporaryDirectory() as folder:
            with seeded(self.seed):
                first = self.make()
                seen_first = self.run(first, self.steps)
                self.save(first, Path(folder))
            with seeded(self.seed):  # a new process begins from the seed again; what went on in between it must load
                second = self.make()
                second = _which(second, self.load(second, Path(folder)))
                loaded = self.state(second).detach().clone()
                seen_second = self.run(second, self.steps)
            follows = list(self._follows(first, Path(folder), loaded))
        equal = torch.equal(self.state(straight), self.state(second))
        off = largest(gap(self.state(straight).double(), self.state(second).double()))
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
        yield from follows
        if len(set(map(repr, seen))) == len(seen):
            yield unjudged(
                "RT", "the end of an epoch", f"no datum came twice in {2 * self.steps} steps",
                "A shuffle that is not restored shows only after an epoch has ended: give steps=… of an epoch or more.",
            )  # fmt: skip

    def _follows(self, first: Any, folder: Path, loaded: Tensor) -> Iterator[Finding]:
        """The saved run goes on, and the same folder is loaded again."""
        before = self.state(first).detach().clone()
        try:
            with seeded(self.seed):
                self.run(first, self.steps)
            with seeded(self.seed):
                third = self.make()
                third = _which(third, self.load(third, folder))
        except Exception:  # a run that was ended by its save, a folder that is loaded once
            return
        if torch.equal(self.state(first), before):
            return
        again = self.state(third).detach()
        off = largest(gap(again.double(), loaded.double()))
        yield judged(
            "RT", "load, after the saved run went on", f"off by {off:.2g}", "bit-equal", torch.equal(again, loaded),
            FOLLOWS,
        )  # fmt: skip


LAWS = (
    Law(
        code="RT",
        name="save and load (RoundTrip)",
        sentence="What is loaded equals what was saved; for modules also what is trainable, the dtypes and tied "
        "weights.",
        needs="make, kick, save, load, outputs",
        how="Saved from a perturbed state, loaded onto a fresh object, outputs compared, and again after another "
        "perturbation of the saved object; law MU checks that the perturbation changed the outputs.",
        traps="From the initial state a save that loses everything passes, hence the perturbation. A load for "
        "inference freezes by design: for_training=False.",
        caught="an empty state dict, keys that are ignored, a tensor that is created anew, PEFT #282 and TRL #6700 "
        "(an adapter is loaded frozen), pytorch #188346 (ties undone by assign=True)",
        check=RoundTrip.check,
    ),
    Law(
        code="RT",
        name="resume (Resume)",
        sentence="2N steps equal N steps, a save, a load and N steps, bit for bit, the next data included.",
        needs="make, run, save, load, state",
        how="Both runs, their states and their data are compared; each begins from the same seed. The checkpoint is "
        "loaded again after the saved run has continued.",
        traps="Other thread counts sum in another order: resume with the same number. State that changes at an "
        "epoch's end shows only in runs of more than one epoch; the verdict notes where none ended.",
        caught="moments, schedules, random states or data streams that restart",
        check=Resume.check,
    ),
)

"""RT: What is loaded equals what was saved; for modules also what is trainable, the dtypes and tied weights.

load(save(x)) gives the same outputs, from a perturbed state, onto something else; what was saved does not change when
training continues

Needs: make, perturb, save, load, outputs
How: Saved from a perturbed state, loaded onto a fresh object, outputs compared, and again after another perturbation of
the saved object. The perturbation has to change the outputs.
Exceptions: From the initial state a save that loses everything passes, hence the perturbation. A load for inference
freezes by design: for_training=False.
Detects: an empty state dict, keys that are ignored, a tensor that is created anew, PEFT #282 and TRL #6700 (an adapter
is loaded frozen), pytorch #188346 (ties undone by assign=True)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from earnest_audit.law import Law
from earnest_audit.subjects.base import gap, largest, outputs
from earnest_audit.verdict import Finding

FOLLOWS = (
    "What was saved changes when training goes on: the save holds the live tensors (a state_dict() that is not copied, "
    "a write that is still under way), and gives back what came later."
)


@dataclass
class RoundTrip:
    """``make()`` gives a fresh object, ``perturb(x)`` perturbs it, ``outputs(x)`` is what must survive.
    ``save(x, folder)`` and ``load(x, folder)`` are given a folder (a ``Path`` that exists and is empty) and name the
    files in it themselves; ``load`` fills the ``x`` that it is given, or returns another.

    Of modules, what is trainable, the dtypes and which tensors are one must survive too; ``for_training=False`` where
    ``load`` is for inference, and freezes or casts by design.
    """

    make: Callable[[], Any]
    perturb: Callable[[Any], None]
    save: Callable[[Any, Path], Any]
    load: Callable[[Any, Path], Any]
    outputs: Callable[[Any], Tensor]
    tolerance: float = 0.0
    for_training: bool = True

    def check(self) -> Iterator[Finding]:
        initial, saved = self.make(), self.make()
        self.perturb(saved)
        wanted = outputs(self.outputs, saved)
        moved = largest(gap(wanted, outputs(self.outputs, initial)))
        yield LAW.finding(
            "the perturbation", f"moved the outputs by {moved:.2g}", "above 0", moved > 0,
            "The perturbation changes nothing, so a save that loses everything would pass.",
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.save(saved, folder)
            loaded = load_onto(self.make(), self.load, folder)
            found = outputs(self.outputs, loaded)
            follows = list(self._follows(saved, folder, wanted, found))
        off = largest(gap(found, wanted))
        yield LAW.finding(
            "save → load", f"outputs off by {off:.2g} (lost everything: {moved:.2g})", f"≤ {self.tolerance:g}",
            off <= self.tolerance,
            "What is loaded is not what was saved: keys are missing or ignored, a tensor is re-initialised, or "
            "something that matters is not saved.",
        )  # fmt: skip
        if off <= self.tolerance:
            yield from follows
        if self.for_training and isinstance(saved, nn.Module) and isinstance(loaded, nn.Module):
            yield from _structure(saved, loaded)

    def _follows(self, saved: Any, folder: Path, wanted: Tensor, found: Tensor) -> Iterator[Finding]:
        """Training goes on after a save: another perturbation of what was saved, and the same folder is loaded
        again."""
        try:
            self.perturb(saved)
            loaded = load_onto(self.make(), self.load, folder)
        except Exception:  # a perturbation or a load that is for once only
            return
        off = largest(gap(outputs(self.outputs, loaded), found))
        if (moved := largest(gap(outputs(self.outputs, saved), wanted))) > self.tolerance:
            measured, room = f"outputs off by {off:.2g} (it went on by {moved:.2g})", f"≤ {self.tolerance:g}"
            yield LAW.finding("load, after the saved one went on", measured, room, off <= self.tolerance, FOLLOWS)


def load_onto(made: Any, load: Callable[[Any, Path], Any], folder: Path) -> Any:
    """What a load has loaded: what it returns, where that is such an object; else what it was given. Reports, such as
    that of ``load_state_dict``, are no such object."""
    given = load(made, folder)
    if isinstance(given, (type(made), nn.Module)):
        return given
    report = given is None or isinstance(given, tuple | list | Mapping | str | int | float)
    return made if report else given


def _structure(saved: nn.Module, loaded: nn.Module) -> Iterator[Finding]:
    """What outputs do not show and the next step does: frozen parameters, other dtypes, ties that are undone."""
    mine, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (saved, loaded))
    names = [n for n in mine if n in theirs]
    if not names:
        why = "Parameters have other names after the load."
        yield LAW.not_applicable("what is trainable", "no names in common", why)
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
        yield LAW.none(subject, wrong, f"{len(wrong)} of {len(names)} differ", f" {meaning}.")


def _first(parameters: Mapping[str, nn.Parameter], names: list[str]) -> dict[str, str]:
    """name -> the first name of the same tensor."""
    seen: dict[int, str] = {}
    return {n: seen.setdefault(id(parameters[n]), n) for n in names}


LAW = Law("RT", "save and load (RoundTrip)", __doc__, RoundTrip.check)

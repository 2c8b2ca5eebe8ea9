"""State that is saved, loaded, resumed, or filled at a first call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from earnest_audit.restore import copied, seeded
from earnest_audit.subjects.base import Subject, equal, gap, largest, outputs
from earnest_audit.verdict import Finding

FOLLOWS = "The save holds live tensors (a state_dict() that is not copied), or its write is still under way."


@dataclass
class RoundTrip(Subject, name="save and load"):
    """RT: What is loaded equals what was saved; for modules also what is trainable, the dtypes and tied weights.

    load(save(x)) gives the same outputs, from a perturbed state, onto something else, also after training went on

    Needs: ``make()`` gives a fresh object, ``perturb(x)`` perturbs it, ``outputs(x)`` is what must survive. ``save(x,
    folder)`` and ``load(x, folder)`` are given an empty folder (a ``Path``) and name the files in it; ``load`` fills
    the ``x`` that it is given, or returns another.
    How: Saved from a perturbed state, loaded onto a fresh object, outputs compared, and again after another
    perturbation of the saved object. The perturbation has to change the outputs.
    Exceptions: A load for inference freezes or casts by design: for_training=False.
    Detects: an empty state dict, keys that are ignored, a tensor that is created anew, PEFT #282 and TRL #6700 (an
    adapter is loaded frozen), pytorch #188346 (ties undone by assign=True)
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
        why = "The perturbation changes nothing, so a save that loses everything would pass."
        yield self.moved("the perturbation", wanted, outputs(self.outputs, initial), why)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.save(saved, folder)
            loaded = load_onto(self.make(), self.load, folder)
            found = outputs(self.outputs, loaded)
            follows = list(self._follows(saved, folder, wanted, found))
        off = largest(gap(found, wanted))
        why = "What is loaded is not what was saved: keys are missing, ignored or not saved, or a tensor is made anew."
        yield self.agrees("save → load", off, self.tolerance, why, "outputs off by {}")
        if off <= self.tolerance:
            yield from follows
        if self.for_training and isinstance(saved, nn.Module) and isinstance(loaded, nn.Module):
            yield from self._structure(saved, loaded)

    def _follows(self, saved: Any, folder: Path, wanted: Tensor, found: Tensor) -> Iterator[Finding]:
        """What was saved is perturbed again, and the same folder loaded again."""
        try:
            self.perturb(saved)
            loaded = load_onto(self.make(), self.load, folder)
        except Exception:  # a perturbation or a load that is for once only
            return
        off = largest(gap(outputs(self.outputs, loaded), found))
        if (moved := largest(gap(outputs(self.outputs, saved), wanted))) > self.tolerance:
            what = f"outputs off by {{}} (it went on by {moved:.2g})"
            yield self.agrees("load, after the saved one went on", off, self.tolerance, FOLLOWS, what)

    def _structure(self, saved: nn.Module, loaded: nn.Module) -> Iterator[Finding]:
        """What outputs do not show and the next step does: frozen parameters, other dtypes, ties that are undone."""
        mine, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (saved, loaded))
        names = [n for n in mine if n in theirs]
        if not names:
            yield self.not_applicable("what is trainable", "no parameter has a name that it had before the save")
            return
        first = [{id(p): n for n, p in reversed(of.items()) if n in names} for of in (mine, theirs)]
        for subject, fact, meaning in (
            ("what is trainable", lambda p, _: p.requires_grad, "are frozen after the load, or no longer: a resumed "
             "run trains another set (by design: for_training=False)"),
            ("dtypes", lambda p, _: p.dtype, "have another dtype after the load"),
            ("tied parameters", lambda p, tied: tied[id(p)], "were one tensor and are two after the load, or the other "
             "way round: they drift apart with the first update"),
        ):  # fmt: skip
            wrong = [n for n in names if fact(mine[n], first[0]) != fact(theirs[n], first[1])]
            yield self.none(subject, wrong, f"{len(wrong)} of {len(names)} differ", f" {meaning}.")


def load_onto(made: Any, load: Callable[[Any, Path], Any], folder: Path) -> Any:
    """What a load returns; what it was given, where that is nothing, or a report such as ``load_state_dict``'s."""
    given = load(made, folder)
    if isinstance(given, type(made)):
        return given
    report = given is None or isinstance(given, tuple | list | Mapping | str | int | float)
    return made if report else given


@dataclass
class Resume(Subject, name="resume"):
    """RT-RESUME: 2N steps equal N steps, a save, a load and N steps, bit for bit, the next data included.

    Needs: ``run(x, n)`` trains n steps and returns the ids of the data that it saw, a list or a tensor; ``state(x)`` is
    everything that is trained, averages of weights included: a tensor, or lists and dicts of them at any depth, such as
    ``[x.model.state_dict(), x.optimizer.state_dict()]`` (``[]`` where only the data is resumed). ``save(x, folder)``
    and ``load(x, folder)`` are given an empty folder (a ``Path``) and name the files in it; ``load`` fills the ``x``
    that it is given, or returns another. A run has to change the state.
    How: Both runs, their states and their data are compared; each begins from the same seed. The checkpoint is loaded
    again after the saved run has continued.
    Exceptions: Other thread counts sum in another order: resume with the same number. State that changes at an epoch's
    end shows only where one ended before the save (a datum came twice): N, 2N and 4N steps are tried.
    Warns: (a run that returns ids and leaves the state as it is) only the data is resumed.
    Detects: moments, schedules, random states or data streams that restart
    """

    make: Callable[[], Any]
    run: Callable[[Any, int], Sequence[Any] | Tensor]
    save: Callable[[Any, Path], Any]
    load: Callable[[Any, Path], Any]
    state: Callable[[Any], Tensor | Mapping[Any, Any] | Sequence[Any]]
    steps: int = 3
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        yield from self._resumed(self.steps)
        reason, ended, later = f"no datum came twice in {4 * self.steps} steps", 0, list[Finding]()
        try:
            with seeded(self.seed):
                run = self.make()
                data = [list(map(repr, self._run(run, self.steps))) for _ in range(4)]
            ended = next((k for k in (1, 2, 4) if len(set(chain(*data[:k]))) < sum(map(len, data[:k]))), 0)
            later = list(self._resumed(ended * self.steps)) if ended > 1 else []
        except Exception as error:
            reason, ended = f"a run of more steps raises {type(error).__name__}", 0
        yield from later
        if not ended:
            why = "A shuffle or a count that is not restored shows where an epoch ends before the save: give steps=…"
            yield self.not_applicable("the end of an epoch", reason, why)

    def _resumed(self, steps: int) -> Iterator[Finding]:
        with seeded(self.seed):
            straight = self.make()
            seen = self._run(straight, steps)
            before = copied(self.state(straight))
            seen += self._run(straight, self.steps)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with seeded(self.seed):
                first = self.make()
                seen_first = self._run(first, steps)
                self.save(first, folder)
            with seeded(self.seed):  # a new process begins from the seed again; what went on in between it must load
                second = load_onto(self.make(), self.load, folder)
                loaded = copied(self.state(second))
                seen_second = self._run(second, self.steps)
            follows = list(self._follows(first, folder, loaded))
        wanted = seen[len(seen_first) :]
        if steps > self.steps and len(seen_second) < len(wanted):
            raise EOFError  # finite data, which a longer run than the declared one may exhaust
        subject, end = f"{steps + self.steps} steps = {steps} + resume + {self.steps}", self.state(straight)
        if not _leaves(end):
            yield self.not_applicable(subject, "the state is empty")
        elif equal(before, end):
            why = "Any resume would pass: give steps=…, or what is trained (only data: state=lambda x: [])."
            row = self.finding(subject, "the run changes nothing", "a run that trains", False, why)
            yield self.law.doubtful(row) if wanted else row
        else:
            why = "A resumed run is another run: moments, a schedule, a random state or a term's state starts afresh."
            yield self._equal(subject, end, self.state(second), why)
        subject, why = "the data after a resume", "The data stream starts again, or skips, after a resume."
        if wanted or seen_second:
            yield self.finding(subject, f"{seen_second[:3]}", f"{wanted[:3]}", equal(seen_second, wanted), why)
        else:
            yield self.not_declared(subject, "the ids of the data, which run(x, n) returns,")
        yield from follows

    def _run(self, x: Any, steps: int) -> list[Any]:
        """The data that a run saw, as plain numbers."""
        return [datum.tolist() if isinstance(datum, Tensor) else datum for datum in self.run(x, steps)]

    def _equal(self, subject: str, a: Any, b: Any, meaning: str) -> Finding:
        mine, theirs = _leaves(a), _leaves(b)
        wrong = [n for n in {**mine, **theirs} if n not in mine or n not in theirs or not equal(mine[n], theirs[n])]
        pairs = ((mine.get(n), theirs.get(n)) for n in wrong)
        alike = ((x, y) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape)
        off = max((largest(gap(x.double(), y.double())) for x, y in alike), default=0.0)
        where = f" in {len(wrong)} of {len(mine)} entries: {', '.join(wrong[:3])}" if any(wrong) else ""
        return self.finding(subject, f"off by {off:.2g}{where}", "bit-equal", not wrong, meaning)

    def _follows(self, first: Any, folder: Path, loaded: Tensor) -> Iterator[Finding]:
        """The saved run goes on, and the same folder is loaded again."""
        before = copied(self.state(first))
        try:
            with seeded(self.seed):
                self.run(first, self.steps)
            with seeded(self.seed):
                third = load_onto(self.make(), self.load, folder)
        except Exception:  # a run that was ended by its save, a folder that is loaded once
            return
        if not equal(self.state(first), before):
            yield self._equal("load, after the saved run went on", self.state(third), loaded, FOLLOWS)


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """What containers hold, by its path; a single value has none."""
    if not isinstance(value, Mapping | list | tuple):
        return {name: value}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {n: leaf for key, part in parts for n, leaf in _leaves(part, f"{name}.{key}".lstrip(".")).items()}


@dataclass
class FirstCall(Subject, name="first call"):
    """FIRST-CALL: What is filled at a first call does not depend on when that is: a reference is the same before and
    after training, and a cache follows what it was made from.

    constant   a call after training = a call before it, also where it is the first one
    follows    after training, a call = the first call of an object that was never called before
    process    two fresh objects give the same

    Needs: ``make()`` gives an object as a new process would have it, ``train(x)`` changes what is trained, ``call(x)``
    is what may be filled lazily (a reference, a cache). ``constant=False`` where it has to follow the training.
    How: Fresh objects: one is called, trained and called again; one is trained and then called for the first time.
    Exceptions: What is random must be seeded in make.
    Detects: a reference that is copied from the policy at its first use, or differs in a new process; a stale cache
    """

    make: Callable[[], Any]
    call: Callable[[Any], Tensor]
    train: Callable[[Any], Any]
    constant: bool = True
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        warm, cold = self._seeded(self.make), self._seeded(self.make)
        before = self._seeded(outputs, self.call, warm)
        fresh = self._seeded(outputs, self.call, self._seeded(self.make))
        why = "Two fresh objects differ: a new process begins from something else (an unseeded draw, a changed file)."
        yield self.same("two fresh objects", before, fresh, why)
        self.train(warm)
        self.train(cold)
        later, first = (self._seeded(outputs, self.call, x) for x in (warm, cold))
        if self.constant:
            why = "It changes with the training: it shares weights with what is trained."
            yield self.same("after training", before, later, why)
            why = "Called for the first time after training it is another one: it is filled lazily, from the policy."
            yield self.same("first called after training", before, first, why)
            return
        why = "Training does not change what is called at all, so a cache that is never made anew would pass."
        yield self.moved("the training", first, before, why)
        stale = "After training the old value is given: what was cached at the first call is not made anew."
        yield self.same("called before and after training", first, later, stale)

    def _seeded(self, act: Callable[..., Any], *given: Any) -> Any:
        with seeded(self.seed):
            return act(*given)

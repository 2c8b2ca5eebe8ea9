"""``earnest audit SCRIPT.py``: run a training script with every trainer that it makes under an ``AuditCallback``, and
every other optimizer that it steps under a ``watch``.

What the script audits itself (``audit(step)``) and what it watches is collected as well. The script runs unchanged, in
this process.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from earnest_audit import executor
from earnest_audit.errors import EarnestError
from earnest_audit.frontends.reports import INTERRUPTED
from earnest_audit.places import caller
from earnest_audit.restore import replaced
from earnest_audit.verdict import Finding, LawBroken, LawOutcome, Verdict
from earnest_audit.watching import watcher
from earnest_audit.watching.monitors import UnownedParameters, parameters_of, unowned_text
from earnest_audit.watching.watcher import OWNED, Watch

TRAINER = "transformers.trainer"
ONLY_WATCHED = Finding(
    "AUDIT", "the loss", "not audited", "-", "not declared",
    "The loss itself was not audited: optimizers were watched while the script ran. Masks, shifted labels, inputs, "
    "signs and settings are checked by audit(model, loss, batch) or audit(Step(…)), in the script or in a test.",
)  # fmt: skip


def audit_script(
    path: Path, arguments: Sequence[str] = (), *, quick: bool = False, strict: bool = False,
    progress: Callable[[str], None] = lambda text: print(f"{text} …"),
) -> Verdict:  # fmt: skip
    """Everything that was found while the script ran; ``strict``: with warnings as failures. A script that does not run
    to its end, or trains nothing, has a failing row AUDIT. Its output, the name of each law as it begins and the
    traceback of an exception go to stderr."""
    if not path.is_file():
        raise EarnestError(f"there is no script {str(path)!r}.")
    # As if `python SCRIPT.py ARGUMENTS` had been typed.
    typed = {"argv": [str(path), *arguments], "path": [str(path.resolve().parent), *sys.path]}
    collected = Collected()
    end: BaseException | None = None
    try:
        with on_stderr(), trained(quick, progress, collected), replaced(sys, typed):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as code:  # the watches end as usual
                end = code if code.code not in (None, 0) else None
    except BaseException as error:  # of any class: what was checked is reported
        end = error
    found = collected.verdict().strict() if strict else collected.verdict()
    if found.findings and not collected.audits:
        title = "the training script, watched only: the loss itself was not audited"
        found = replace(found, findings=(*found.findings, ONLY_WATCHED), title=title)
    stops_at_its_law = found.failures and isinstance(end, LawBroken | SystemExit)
    if (end is not None and not stops_at_its_law) or not found.findings:
        row = _stopped(path, end, collected)
        print(f"earnest-audit: {row.meaning}", file=sys.stderr)
        title = f"the training script {row.measured}: what was checked until then"
        found = replace(found, findings=(*found.findings, row), title=title)
    return found.at(f"{path.as_posix()}:1")


@contextmanager
def on_stderr() -> Iterator[None]:
    """Inside, what is printed goes to stderr, also what child processes and code that is not Python print."""
    kept = None
    with redirect_stdout(sys.stderr):
        try:
            with suppress(OSError):  # a process without stdout
                kept = os.dup(1)
                os.dup2(2, 1)
            yield
        finally:
            if kept is not None:
                os.dup2(kept, 1)
                os.close(kept)


def _stopped(path: Path, end: BaseException | None, collected: Collected) -> Finding:
    """The row of a script that did not run to its end, or trained nothing."""
    what, why = INTERRUPTED, "what comes after was not checked"
    if end is None:
        owners = "only optimizers that own no module's parameter" if collected.stepped else "no optimizer"
        what, why = "trained nothing", f"it made no transformers.Trainer, stepped {owners} and called no audit(Step(…))"
        why += ". Put a loop that trains in another way under `with watch(model, optimizer) as w:`"
    elif isinstance(end, SystemExit):
        what = f"ended with {end.code!r}"
    elif not isinstance(end, KeyboardInterrupt):
        what, why = f"raised {type(end).__name__}", " ".join(str(end).split()).removesuffix(".") or why
        if not isinstance(end, EarnestError):
            traceback.print_exception(end)
    frames = traceback.extract_tb(end.__traceback__ if end else None)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), 1)
    meaning, place = f"{path.name} {what}: {why}.", f"{path.as_posix()}:{line}"
    return Finding("AUDIT", path.name, what, "runs to its end", "fails", meaning, place)


@contextmanager
def trained(
    quick: bool = False, progress: Callable[[str], None] | None = None, found: Collected | None = None
) -> Iterator[Collected]:
    """Collects the audits and watches of everything that trains inside: each Trainer gets an AuditCallback, every other
    optimizer a Watch."""
    found = found or Collected()
    with ExitStack() as stack:
        shown = executor.PROGRESS if progress is None else [progress]
        heard = [found.audits.append, *executor.LISTENERS]
        stack.enter_context(replaced(executor, {"LISTENERS": heard, "PROGRESS": shown}))
        stack.enter_context(replaced(watcher, {"WATCHED": [found.watches, *watcher.WATCHED]}))
        stack.enter_context(injected(quick))
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: found.at_step(optimizer, stack))
        stack.callback(handle.remove)
        yield found


class Collected:
    """The verdicts of ``audit``, the watches that have begun, and the parameters without an optimizer in any module."""

    def __init__(self) -> None:
        self.audits: list[Verdict] = []
        self.watches: list[Watch] = []
        self.stepped = False  # whether any optimizer did
        self._place = ""  # where the first one stepped
        self._known = WeakSet[torch.optim.Optimizer]()
        self._owned, self._unowned = WeakIdKeyDictionary(), UnownedParameters()

    def verdict(self) -> Verdict:
        found = sum([*self.audits, *(w.verdict() for w in self.watches)], Verdict(()))
        rows = tuple(self._missing())
        if rows:  # "0 are missing" is then true of a part of the model only
            kept = (f for f in found.findings if f.subject != OWNED or f.outcome != "holds")
            found = replace(found, findings=tuple(kept))
        return found + Verdict(rows)

    def _missing(self) -> Iterator[Finding]:
        """Those that no watch reports. If other parameters of their module are trained, a parameter group was
        forgotten. A module without any trained parameter may be frozen on purpose (a perceptual loss)."""
        reported = {parameter.key for w in self.watches for parameter in w.unowned.missing()[0]}
        missing = [parameter for parameter in self._unowned.missing()[0] if parameter.key not in reported]
        for sure in (True, False):
            if some := [parameter for parameter in missing if parameter.sure == sure]:
                measured = f"{len(some)} get gradients and stay constant"
                outcome: LawOutcome = "fails" if sure else "not declared"
                subject = "parameters without an optimizer"
                yield Finding("GL", subject, measured, "0", outcome, unowned_text(some), self._place)

    def at_step(self, optimizer: torch.optim.Optimizer, until: ExitStack) -> None:
        """Watch the optimizer from its first step on, with the module whose parameters it owns, unless a watch has it
        already. Steps that an audit makes do not count."""
        if executor.RUNNING:
            return
        if optimizer in self._known:
            self._unowned.look_again(self._owned.__contains__)
            return
        self.stepped, self._place = True, self._place or caller()
        self._known.add(optimizer)
        self._owned.update((p, True) for p in parameters_of(optimizer))
        for module in sorted(_modules(), key=lambda m: -sum(1 for _ in m.parameters())):
            named = [(f"{type(module).__name__}.{n}", p) for n, p in module.named_parameters()]
            self._unowned.look(named, self._owned.__contains__, any(p in self._owned for _, p in named))
        known = [w.optimizer for w in self.watches]
        if any(o is optimizer or optimizer in getattr(o, "members", ()) for o in known):
            return
        if (model := _owner(optimizer)) is not None:
            until.enter_context(Watch(model, optimizer)).outside = True


@contextmanager
def injected(quick: bool) -> Iterator[None]:
    """Every trainer that is made inside gets a callback, unless it brings one. Transformers' trainer, which is slow to
    import, is changed when the script imports it."""
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            own = module.Trainer.__init__

            @wraps(own)
            def made(self: Any, *args: Any, **kwargs: Any) -> None:
                from earnest_audit.frontends.callback import AuditCallback

                own(self, *args, **kwargs)
                if not any(isinstance(c, AuditCallback) for c in self.callback_handler.callbacks):
                    self.add_callback(AuditCallback(quick=quick))

            module.Trainer.__init__ = made
            stack.callback(setattr, module.Trainer, "__init__", own)

        if TRAINER in sys.modules:
            change(sys.modules[TRAINER])
        else:
            sys.meta_path.insert(0, finder := _AfterImport(change))
            stack.callback(finder.leave)
        yield


class _AfterImport(MetaPathFinder):
    """Calls ``act`` with transformers' trainer module after its import."""

    def __init__(self, act: Callable[[ModuleType], None]) -> None:
        self.act = act

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TRAINER:
            return None
        self.leave()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Several(nn.ModuleList):
    """Modules without a common parent, whose parameters one optimizer owns."""


def _modules() -> list[nn.Module]:
    """Every module that exists, without those made here."""
    return [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and not isinstance(m, _Several)]


def _owner(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """The smallest module that has all of the optimizer's parameters, without those of layers that are gone; the fewest
    such modules where no single one has them all."""
    left = set(map(id, parameters_of(optimizer)))
    held = [(m, {id(p) for p in m.parameters()}) for m in _modules()]
    chosen: list[nn.Module] = []
    while found := [(module, has) for module, has in held if has & left]:
        module, has = min(found, key=lambda pair: (-len(pair[1] & left), len(pair[1])))
        chosen.append(module)
        left -= has
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    several = _Several(chosen)
    several.training = any(m.training for m in chosen)
    return several

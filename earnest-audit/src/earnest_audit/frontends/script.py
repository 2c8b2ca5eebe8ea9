"""``earnest audit SCRIPT.py``: run a training script with every trainer that it makes under an ``AuditCallback``, and
every other optimizer that it steps under a ``watch``.

What the script audits itself (``audit(step)``) and what it watches is collected as well. The script runs unchanged, in
this process.
"""

from __future__ import annotations

import gc
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from earnest_audit import executor
from earnest_audit.errors import EarnestError
from earnest_audit.laws.liveness import some
from earnest_audit.limits import ENOUGH
from earnest_audit.places import caller
from earnest_audit.restore import replaced
from earnest_audit.verdict import Finding, LawBroken, Verdict
from earnest_audit.watching.monitors import entries
from earnest_audit.watching.watcher import OWNED, WATCHED, Watch

TRAINER = "transformers.trainer"
PASTE = """\
from earnest_audit import watch

with watch(model, optimizer) as w:  # around the training loop"""
ONLY_WATCHED = Finding(
    "AUDIT", "the loss", "not audited", "-", "not declared",
    "The loss itself was not audited: optimizers were watched while the script ran. Masks, shifted labels, inputs, "
    "signs and settings are checked by audit(model, loss, batch) or audit(Step(…)), in the script or in a test.",
)  # fmt: skip


class ScriptError(EarnestError):
    """A script cannot be audited."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the verdict of what was checked until then."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


def audit_script(
    path: Path, arguments: Sequence[str] = (), *, quick: bool = False, strict: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Verdict:  # fmt: skip
    """Everything that was found while the script ran; ``strict``: with warnings as failures."""
    if not path.is_file():
        raise ScriptError(f"there is no script {str(path)!r}.")
    typed = {"argv": [str(path), *arguments], "path": [str(path.resolve().parent), *sys.path]}
    with trained(quick, progress) as found, replaced(sys, typed):  # as if `python SCRIPT.py ARGUMENTS` had been typed
        try:
            runpy.run_path(str(path), run_name="__main__")
        except KeyboardInterrupt as error:
            title = "interrupted: what was checked until then"
            raise Interrupted(replace(_judged(found, path, strict), title=title)) from error
        except (Exception, SystemExit) as error:
            _judge_what_ran(path, error, found.verdict().strict() if strict else found.verdict())
    verdict = _judged(found, path, strict)
    if not verdict.findings:
        owned = "the optimizers that stepped own no module's parameter"
        raise ScriptError(
            f"{path.name} ran, and made no transformers.Trainer, {owned if found.stepped else 'stepped no optimizer'} "
            f"and it called no audit(Step(…)): nothing to judge. Where a loop trains in another way, put it under a "
            f"watch:\n\n{PASTE}\n"
        )
    if found.audits:
        return verdict
    title = "the training script, watched only: the loss itself was not audited"
    return replace(verdict, findings=(*verdict.findings, ONLY_WATCHED), title=title)


def _judged(found: Found, path: Path, strict: bool) -> Verdict:
    return (found.verdict().strict() if strict else found.verdict()).at(f"{path.as_posix()}:1")


def _judge_what_ran(path: Path, error: Exception | SystemExit, found: Verdict) -> None:
    """Go on where a law was broken before the script raised; otherwise raise, because the script did not run well."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return
        what = f"{path.name} ended with {error.code!r}"
    elif isinstance(error, LawBroken) and found.failures:
        what = f"{path.name} stopped at a broken law: {type(error).__name__}"
    else:
        traceback.print_exc()
        what = f"{path.name} raised {type(error).__name__}"
    if found.failures:
        print(f"{what}; what ran before is judged.", file=sys.stderr)
    elif found.holds:
        warned = "".join(f"\n  warning: {f}" for f in found.warnings)
        raise ScriptError(f"{what}. No law was broken before; the rest was not checked.{warned}") from error
    else:
        raise ScriptError(f"{what} before it could be judged.") from error


@contextmanager
def trained(quick: bool = False, progress: Callable[[str], None] | None = None) -> Iterator[Found]:
    """Everything that trains inside is under the audit: trainers by a callback, whose audits are heard and whose
    watches are seen, and every other optimizer that steps by a watch."""
    found = Found()
    with ExitStack() as stack:
        stack.enter_context(_listed(executor.LISTENERS, found.audits.append))
        stack.enter_context(_listed(WATCHED, found.watches))
        if progress is not None:
            stack.enter_context(_listed(executor.PROGRESS, progress))
        stack.enter_context(injected(quick))
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: found.at_step(optimizer, stack))
        stack.callback(handle.remove)
        yield found


class Found:
    """What has been found up to now: the verdicts of ``audit``, and the watches that have begun."""

    def __init__(self) -> None:
        self.audits: list[Verdict] = []
        self.watches: list[Watch] = []
        self._strays, self._seen = Strays(), set[int]()

    def verdict(self) -> Verdict:
        strays = tuple(self._strays.findings())
        found = sum([*self.audits, *(w.verdict() for w in self.watches)], Verdict(()))
        if strays:  # "0 are missing" is then true of a part of the model only
            rows = (f for f in found.findings if f.subject != OWNED or f.outcome != "holds")
            found = replace(found, findings=tuple(rows))
        return found + Verdict(strays)

    @property
    def stepped(self) -> bool:
        """Whether any optimizer did."""
        return bool(self._seen)

    def at_step(self, optimizer: torch.optim.Optimizer, until: ExitStack) -> None:
        """Watch the optimizer from its first step on, with the module whose parameters it owns, unless a watch has it
        already. Steps that an audit makes do not count."""
        if executor.RUNNING:
            return
        if id(optimizer) in self._seen:
            self._strays.look()
            return
        self._seen.add(id(optimizer))
        self._strays.begin(optimizer)
        known = [w.optimizer for w in self.watches]
        if any(o is optimizer or optimizer in getattr(o, "members", ()) for o in known):
            return
        if (model := _owner(optimizer)) is not None:
            until.enter_context(Watch(model, optimizer)).outside = True


@dataclass
class _Stray:
    name: str
    value: Tensor
    gradient: Tensor
    partly: bool = False  # whether other parameters of its module are trained
    owned: bool = False  # by an optimizer that stepped later
    looks: int = 0  # new gradients in a row after which the parameter had not changed


class Strays:
    """Finds parameters that get a gradient and belong to no optimizer, among all modules. Call ``begin`` at the first
    step of an optimizer, and ``look`` at each of its steps.

    If other parameters of the same module are trained, this is a failure: a parameter group was forgotten. A module
    without any trained parameter may be frozen on purpose (a perceptual loss), so it is only reported.
    """

    def __init__(self) -> None:
        self.owned = WeakIdKeyDictionary()
        self.strays = WeakIdKeyDictionary()
        self.found: list[_Stray] = []  # also of modules that are gone
        self.place = ""  # where the first optimizer stepped

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self.place = self.place or caller()
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.owned[p] = True
                if p in self.strays:
                    self.strays[p].owned = True
        for module in sorted(_modules(), key=lambda m: -sum(1 for _ in m.parameters())):
            named = {n: p for n, p in module.named_parameters() if p.requires_grad}
            trained = any(p in self.owned for p in named.values())
            for n, p in named.items():
                if p in self.owned or p.grad is None or p.layout != torch.strided:
                    continue
                if p not in self.strays:
                    self.strays[p] = _Stray(f"{type(module).__name__}.{n}", entries(p).clone(), entries(p.grad).clone())
                    self.found.append(self.strays[p])
                self.strays[p].partly |= trained

    def look(self) -> None:
        """Call before a step: counts new gradients. A parameter that has changed is trained elsewhere."""
        for p, stray in list(self.strays.items()):
            now = None if p.grad is None else entries(p.grad).clone()
            if now is None or torch.equal(now, stray.gradient):
                continue
            stray.gradient = now
            value = entries(p).clone()
            stray.looks = stray.looks + 1 if torch.equal(value, stray.value) else 0
            stray.value = value

    def findings(self) -> Iterator[Finding]:
        found = [s for s in self.found if not s.owned and s.looks >= ENOUGH]
        for partly in (True, False):
            names = [s.name for s in found if s.partly == partly]
            if names:
                yield Finding(
                    "GL", "parameters without an optimizer", f"{len(names)} get gradients and stay constant", "0",
                    "fails" if partly else "not declared",
                    f"{some(names)} get a gradient in every update, and no optimizer has them. Add them to the "
                    "optimizer's parameters; where they are meant to stay, requires_grad_(False) freezes them.",
                    self.place,
                )  # fmt: skip


@contextmanager
def _listed(place: list[Any], item: Any) -> Iterator[None]:
    """Inside, this item is the first of the list."""
    place.insert(0, item)
    try:
        yield
    finally:
        place[:] = [other for other in place if other is not item]


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
            stack.enter_context(_listed(sys.meta_path, _AfterImport(change)))
        yield


class _AfterImport(MetaPathFinder):
    """Calls ``act`` with transformers' trainer module after its import."""

    def __init__(self, act: Callable[[ModuleType], None]) -> None:
        self.act = act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TRAINER:
            return None
        sys.meta_path.remove(self)
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
    left = {id(p) for group in optimizer.param_groups for p in group["params"]}
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

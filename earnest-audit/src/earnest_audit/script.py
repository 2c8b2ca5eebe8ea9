"""``earnest audit SCRIPT.py``: run a training script with every trainer that it makes under an ``AuditCallback``, and
every other optimizer that it steps under a ``watch``.

What the script audits itself (``audit(step)``) and what it watches is collected as well. The script runs unchanged, in
this process.
"""

from __future__ import annotations

import logging
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from earnest_audit import executor
from earnest_audit.errors import EarnestError
from earnest_audit.strays import Strays, modules
from earnest_audit.verdict import Finding, LawBroken, Verdict
from earnest_audit.watcher import WATCHED, Watch

TRAINER = "transformers.trainer"
NOISY = ("torchao", "torch.utils._pytree")  # loggers that warn while transformers' trainer is imported
PASTE = """\
from earnest_audit import watch

with watch(model, optimizer) as w:  # around the training loop"""


ONLY_WATCHED = (
    "The loss itself was not audited: optimizers were watched while the script ran. Masks, shifted labels, inputs, "
    "signs and settings are checked by audit(model, loss, batch) or audit(Step(…)), in the script or in a test."
)


WATCHED_ONLY = "watched only: the loss itself was not audited"


class ScriptError(EarnestError):
    """A script cannot be audited."""


def audit_script(
    path: Path, arguments: Sequence[str] = (), *, quick: bool = False, progress: Callable[[str], None] | None = None
) -> Verdict:
    """Everything that was found while the script ran."""
    if not path.is_file():
        raise ScriptError(f"there is no script {str(path)!r}.")
    audited: list[Verdict] = []
    executor.LISTENERS.append(audited.append)
    try:
        with trained(quick, progress) as verdict, _called(path, arguments):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except LawBroken as error:
                if not verdict().failures:
                    raise
                print(f"{path.name} stopped at a broken law: {type(error).__name__}.", file=sys.stderr)
            except (Exception, SystemExit) as error:
                _judge_what_ran(path, error, verdict())
    finally:
        executor.LISTENERS.remove(audited.append)
    if not verdict().findings:
        raise ScriptError(
            f"{path.name} ran, and made no transformers.Trainer, stepped no optimizer of a module and called no "
            f"audit(Step(…)): nothing to judge. Where a loop trains in another way, put it under a watch:\n\n{PASTE}\n"
        )
    found = verdict().at(f"{path.as_posix()}:1")
    if audited:
        return found
    unaudited = Finding("AUDIT", "the loss", "not audited", "-", "not declared", ONLY_WATCHED)
    return replace(found, findings=(*found.findings, unaudited), title=f"the training script, {WATCHED_ONLY}")


def _judge_what_ran(path: Path, error: Exception | SystemExit, found: Verdict) -> None:
    """Go on where a law was broken before the script raised; otherwise raise, because the script did not run well."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return
        what = f"{path.name} ended with {error.code!r}"
    else:
        traceback.print_exc()
        what = f"{path.name} raised {type(error).__name__}"
    if found.failures:
        print(f"{what}; what ran before is judged.", file=sys.stderr)
    elif any(f.outcome == "holds" for f in found.findings):
        raise ScriptError(f"{what}. Every law that was checked before holds; the rest was not checked.") from error
    else:
        raise ScriptError(f"{what} before it could be judged.") from error


@contextmanager
def trained(quick: bool = False, progress: Callable[[str], None] | None = None) -> Iterator[Callable[[], Verdict]]:
    """Everything that trains inside is under the audit; the function returns what has been found up to now. The
    callbacks' audits are heard, and their watches are seen."""
    with collected(progress) as (heard, watches), injected(quick), watched(watches) as strays:
        yield lambda: sum([*heard, *(w.verdict() for w in watches), strays()], Verdict(()))


@contextmanager
def collected(progress: Callable[[str], None] | None = None) -> Iterator[tuple[list[Verdict], list[Watch]]]:
    """Every verdict that ``audit`` gives inside, and every watch that begins there."""
    heard: list[Verdict] = []
    watches: list[Watch] = []
    tellers = [] if progress is None else [progress]
    executor.LISTENERS.append(heard.append)
    executor.PROGRESS.extend(tellers)
    WATCHED.append(watches)
    try:
        yield heard, watches
    finally:
        executor.LISTENERS.remove(heard.append)
        for tell in tellers:
            executor.PROGRESS.remove(tell)
        WATCHED[:] = [w for w in WATCHED if w is not watches]


@contextmanager
def injected(quick: bool) -> Iterator[None]:
    """Every trainer that is made inside gets a callback, unless it brings one. Transformers' trainer, which is slow to
    import, is changed when the script imports it."""
    restore: list[Callable[[], None]] = []

    def change(module: ModuleType) -> None:
        trainer: Any = module.Trainer
        own = trainer.__init__

        @wraps(own)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            from earnest_audit.callback import AuditCallback

            own(self, *args, **kwargs)
            if not any(isinstance(c, AuditCallback) for c in self.callback_handler.callbacks):
                self.add_callback(AuditCallback(quick=quick))

        trainer.__init__ = made
        restore.append(lambda: setattr(trainer, "__init__", own))

    finder = _AfterImport(change)
    if TRAINER in sys.modules:
        change(sys.modules[TRAINER])
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for undo in restore:
            undo()


class _AfterImport(MetaPathFinder):
    """Calls ``act`` with transformers' trainer module after its import, without the warnings of that import."""

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
                with _without_warnings():
                    load(module)
                self.act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _without_warnings() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in NOISY}
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def watched(watches: list[Watch]) -> Iterator[Callable[[], Verdict]]:
    """Every optimizer that steps inside is watched from its first step on, with the module whose parameters it owns,
    unless ``watches`` has it already. Steps that an audit makes do not count. Yields a function that returns what was
    found of parameters that no optimizer has."""
    begun: list[Watch] = []
    seen: set[int] = set()
    strays = Strays()

    def begin(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if executor.RUNNING:
            return
        if id(optimizer) in seen:
            strays.look()
            return
        seen.add(id(optimizer))
        strays.begin(optimizer)
        known = [w.optimizer for w in watches]
        if any(o is optimizer or optimizer in getattr(o, "members", ()) for o in known):
            return
        if (model := _owner(optimizer)) is not None:
            begun.append(Watch(model, optimizer))
            begun[-1].__enter__()

    handle = register_optimizer_step_pre_hook(begin)
    try:
        yield lambda: Verdict(tuple(strays.findings()))
    except BaseException as error:
        for watch in begun:
            watch.__exit__(type(error), error, None)
        raise
    finally:
        handle.remove()
    for watch in begun:
        watch.__exit__(None, None, None)


def _owner(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """The smallest module that has all of the optimizer's parameters."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sizes: list[tuple[int, nn.Module]] = []
    for module in modules():
        held = {id(p) for p in module.parameters()}
        if owned and owned <= held:
            sizes.append((len(held), module))
    return min(sizes, key=lambda found: found[0])[1] if sizes else None


@contextmanager
def _called(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """As if ``python SCRIPT.py ARGUMENTS`` had been typed."""
    argv, places = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(path), *arguments], [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places

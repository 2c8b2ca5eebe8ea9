"""``earnest audit SCRIPT.py``: run a training script with every trainer that it makes under an ``AuditCallback``.

What the script audits itself (``audit(step)``) and what it puts under ``watch`` is collected as well. The script runs
as it is, in this process.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from earnest.audit import run
from earnest.audit.verdict import Verdict
from earnest.audit.watch import WATCHED, Watch
from earnest.errors import EarnestError


class ScriptError(EarnestError):
    """A script cannot be audited."""


def audit_script(
    path: Path, arguments: Sequence[str] = (), *, quick: bool = False, progress: Callable[[str], None] | None = None
) -> Verdict:
    """Everything that was found while the script ran."""
    if not path.is_file():
        raise ScriptError(f"there is no script {str(path)!r}.")
    with collected(progress) as (heard, watches), injected(quick), _called(path, arguments):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise ScriptError(f"{path.name} ended with {stop.code!r} before it could be judged.") from stop
    verdicts = [*heard, *(w.verdict() for w in watches)]  # the callbacks' audits are heard, their watches seen
    if not verdicts:
        raise ScriptError(
            f"{path.name} ran, and made no transformers.Trainer, no audit(Step(…)) and no watch(model, …): nothing to "
            "judge."
        )
    return sum(verdicts, Verdict(()))


@contextmanager
def collected(progress: Callable[[str], None] | None = None) -> Iterator[tuple[list[Verdict], list[Watch]]]:
    """Every verdict that ``audit`` gives inside, and every watch that begins there."""
    heard: list[Verdict] = []
    watches: list[Watch] = []
    tellers = [] if progress is None else [progress]
    run.LISTENERS.append(heard.append)
    run.TELLERS.extend(tellers)
    WATCHED.append(watches)
    try:
        yield heard, watches
    finally:
        run.LISTENERS.remove(heard.append)
        for tell in tellers:
            run.TELLERS.remove(tell)
        WATCHED[:] = [w for w in WATCHED if w is not watches]


@contextmanager
def injected(quick: bool) -> Iterator[None]:
    """Every trainer that is made inside gets a callback, unless it brings one."""
    from transformers import Trainer

    from earnest.audit.callback import AuditCallback

    own = Trainer.__init__

    @wraps(own)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if not any(isinstance(c, AuditCallback) for c in self.callback_handler.callbacks):
            self.add_callback(AuditCallback(quick=quick))

    Trainer.__init__ = made
    try:
        yield
    finally:
        Trainer.__init__ = own


@contextmanager
def _called(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """As if ``python SCRIPT.py ARGUMENTS`` had been typed."""
    argv, places = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(path), *arguments], [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places

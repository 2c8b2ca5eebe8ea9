"""``earnest audit SCRIPT.py``: run a training script with every trainer that it makes under an ``AuditCallback``.

What the script audits itself (``audit(step)``) is collected as well. The script runs as it is, in this process.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from earnest.audit import run
from earnest.audit.verdict import Verdict
from earnest.errors import EarnestError


class ScriptError(EarnestError):
    """A script cannot be audited."""


def audit_script(path: Path, arguments: Sequence[str] = (), *, quick: bool = False) -> Verdict:
    """Everything that was found while the script ran."""
    if not path.is_file():
        raise ScriptError(f"there is no script {str(path)!r}.")
    with collected() as heard, injected(quick) as callbacks, _called(path, arguments):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise ScriptError(f"{path.name} ended with {stop.code!r} before it could be judged.") from stop
    verdicts = [
        *heard,
        *(c.watch.verdict() for c in callbacks if c.watch is not None),
    ]  # the callbacks' audits are heard
    if not verdicts:
        raise ScriptError(
            f"{path.name} ran, and made neither a transformers.Trainer nor an audit(Step(…)): nothing to judge."
        )
    return Verdict(tuple(f for v in verdicts for f in v.findings), sum(v.cost for v in verdicts))


@contextmanager
def collected() -> Iterator[list[Verdict]]:
    """Every verdict that ``audit`` gives inside."""
    heard: list[Verdict] = []
    run.LISTENERS.append(heard.append)
    try:
        yield heard
    finally:
        run.LISTENERS.remove(heard.append)


@contextmanager
def injected(quick: bool) -> Iterator[list[Any]]:
    """Every trainer that is made inside gets a callback, unless it brings one."""
    from transformers import Trainer

    from earnest.audit.callback import AuditCallback

    callbacks: list[AuditCallback] = []
    own = Trainer.__init__

    @wraps(own)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        present = [c for c in self.callback_handler.callbacks if isinstance(c, AuditCallback)]
        callback = present[0] if present else AuditCallback(quick=quick)
        if not present:
            self.add_callback(callback)
        callbacks.append(callback)

    Trainer.__init__ = made
    try:
        yield callbacks
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

"""Print the path of `earnest run quickstart steps=1` through the files of earnest, from one traced run.

    python scripts/step_path.py            the hops of docs/architecture.md
    python scripts/step_path.py --all      every call from one function of earnest to another

A hop is the first call of a function from another file, if that function (or a function of its file that it calls)
goes on to a third file. Helpers (HELPERS) and calls inside the parts in CLOSED are not followed. Imports, generated
methods, properties, and dunder methods other than ``__init__`` and ``__call__`` do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import earnest
from earnest.cli import main

ROOT = f"{Path(earnest.__file__).parent}/"
HELPERS = re.compile(r"(disk|lazy|plugins|registry|seeds|settings)\.py|objectives/metrics\.py|runs/progress\.py")
CLOSED = {
    ("adapters/adapter.py", "Adapter.merged"),
    ("adapters/adapter.py", "Adapter.save"),
    ("adapters/attach.py", "attach"),
    ("config/loading.py", "dump"),
    ("engines/local.py", "LocalEngine.__init__"),
    ("models/loading.py", "load"),
    ("models/policy.py", "Policy.hidden"),
    ("proving/proof.py", "prove"),
    ("report/page.py", "write"),
    ("runs/checkpoints.py", "save"),
    ("runs/environment.py", "describe"),
    ("runs/evaluate.py", "evaluate"),
    ("runs/folder.py", "RunFolder.create"),
    ("runs/folder.py", "RunFolder.update"),
    ("runs/preflight.py", "preflight"),
    ("runs/verdicts.py", "write"),
}


class Function(NamedTuple):
    """A function of earnest; ``file`` is relative to src/earnest."""

    file: str
    name: str


class Tracer:
    """A profile function that records which function of earnest calls which, in the order of first calls."""

    def __init__(self) -> None:
        self.calls: dict[tuple[CodeType, CodeType], int] = {}
        self.importing = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self.importing += (event == "call") - (event == "return")
        elif event == "call" and not self.importing and _counts(code):
            caller = frame.f_back
            while caller is not None and not _counts(caller.f_code):
                caller = caller.f_back
            if caller is not None and caller.f_code is not code:
                edge = (caller.f_code, code)
                self.calls[edge] = self.calls.get(edge, 0) + 1


def trace(*arguments: str) -> dict[tuple[Function, Function], int]:
    """(caller, callee) → number of calls, in the order of first calls, in a run with these arguments of `earnest`."""
    tracer, before = Tracer(), sys.argv
    sys.argv = ["earnest", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            sys.setprofile(tracer)
            main()
    finally:
        sys.setprofile(None)
        sys.argv = before
    left_out = _properties()
    return {
        (_function(caller), _function(callee)): count
        for (caller, callee), count in tracer.calls.items()
        if caller not in left_out and callee not in left_out
    }


def hops(calls: dict[tuple[Function, Function], int], start: Function) -> list[tuple[Function, Function]]:
    """(caller, callee) of every hop after ``start``, depth first."""
    callees: dict[Function, list[Function]] = {}
    for caller, callee in calls:
        callees.setdefault(caller, []).append(callee)

    def leaves_file(function: Function, seen: frozenset[Function] = frozenset()) -> bool:
        return function not in seen and any(
            callee.file != function.file or leaves_file(callee, seen | {function})
            for callee in callees.get(function, [])
        )

    found: list[tuple[Function, Function]] = []
    seen = {start}

    def follow(caller: Function) -> None:
        for callee in callees.get(caller, []):
            if callee in seen or HELPERS.fullmatch(callee.file):
                continue
            seen.add(callee)
            if callee.file != caller.file and leaves_file(callee):
                found.append((caller, callee))
            if callee not in CLOSED:
                follow(callee)

    follow(start)
    return found


def _function(code: CodeType) -> Function:
    return Function(code.co_filename.removeprefix(ROOT), getattr(code, "co_qualname", code.co_name))


@functools.cache
def _counts(code: CodeType) -> bool:
    name = code.co_name
    dunder = name.startswith("__") and name not in ("__init__", "__call__")
    return code.co_filename.startswith(ROOT) and not name.startswith("<") and not dunder


def _properties() -> set[CodeType]:
    """The code of every property of the imported classes of earnest."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "earnest"]
    classes = {c for module in modules for c in vars(module).values() if isinstance(c, type)}
    members = [member for c in classes for base in c.__mro__ for member in vars(base).values()]
    getters = [member.fget for member in members if isinstance(member, property)]
    getters += [member.func for member in members if isinstance(member, functools.cached_property)]
    return {code for getter in getters if isinstance(code := getattr(getter, "__code__", None), CodeType)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every call from one function of earnest to another")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = trace("run", "quickstart", "steps=1", f"out={folder}/run")
    path = list(calls) if wanted.all else hops(calls, Function("cli.py", "run"))
    for number, (caller, callee) in enumerate(path, 1):
        print(f"{number:4} {caller.file} {caller.name} → {callee.file} {callee.name}")

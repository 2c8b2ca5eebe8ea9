"""Write constraints.txt: the installed version of every dependency of `earnest[dev]`.

    python -m scripts.pins            print what would be written
    python -m scripts.pins --write    write it

Only the closure of our own requirements is pinned, so a developer's other packages are not in the file. The local part
of a version (`2.13.0+cpu`) is dropped, because an index may not have that build.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HEADER = """\
# The versions that the tests ran with. `make demo` and `make test` install with them; pyproject.toml has the ranges.
# Written by `make pins` from what is installed. Why it exists: docs/adr/0001-constraints.md
"""
# The build backend is installed by pip in an environment of its own, which obeys constraints too.
BUILD = ("setuptools",)
# Distributions of this repository.
OWN = {"earnest", "earnest-audit"}


def closure(name: str, extras: frozenset[str] = frozenset()) -> dict[str, str]:
    """Canonical name → installed version of every distribution that `name[extras]` needs, our own left out."""
    pins: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(name, extra) for extra in ("", *extras)]
    while todo:
        name_, extra = todo.pop()
        key = (canonicalize_name(name_), extra)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = metadata.distribution(name_)
        except metadata.PackageNotFoundError:
            missing.add(name_)
            continue
        pins[key[0]] = found.version.split("+")[0]
        for line in found.requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                todo += [(need.name, e) for e in ("", *need.extras)]
    if missing:
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}; run `make test-integrations` first")
    return {name: version for name, version in pins.items() if name not in OWN}


def constraints() -> str:
    pins = closure("earnest", frozenset({"dev"}))
    pins |= {name: metadata.version(name) for name in BUILD}
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        CONSTRAINTS.write_text(constraints())
    elif not sys.argv[1:]:
        print(constraints(), end="")
    else:
        raise SystemExit(__doc__)

"""docs/architecture.md names every package, and files and functions that exist."""

from __future__ import annotations

import re

from scripts.docs.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "earnest"
HOPS = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `(\w+)` \|", PAGE, re.M)


def test_every_hop_names_a_function_of_its_file() -> None:
    missing = [
        f"{file}: {name}"
        for file, name in HOPS
        if not re.search(rf"^\s*(def|class) {name}\b", (SOURCE / file).read_text(encoding="utf-8"), re.M)
    ]
    assert HOPS and not missing


def test_every_package_is_in_the_table() -> None:
    table = PAGE.split("## Packages")[1].split("## One")[0]
    tops = [p.name + ("/" if p.is_dir() else "") for p in SOURCE.iterdir() if not p.name.startswith("_")]
    tops = [t for t in tops if t not in ("recipes/", "py.typed") and not t.endswith(".pyi")]
    assert [t for t in tops if f"`{t}`" not in table] == []

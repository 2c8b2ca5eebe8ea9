"""``python -m scripts.mutants.table``: the scores of the packages and the mutants that survived, as markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.mutants.judge import EQUIVALENT, OUT


def results(folder: Path = OUT) -> dict[str, list[dict[str, str]]]:
    """Package → its mutants, each with its last result."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.stem] = list({line["key"]: line for line in lines}.values())
    return found


def rows(found: dict[str, list[dict[str, str]]], equivalent: dict[str, str]) -> Iterable[str]:
    yield "| package | mutants | killed | equivalent | survived | score |"
    yield "|---|---|---|---|---|---|"
    for package, mine in found.items():
        killed = sum(r["fate"] in ("killed", "timeout") for r in mine)
        same = sum(r["fate"] not in ("killed", "timeout") and r["key"] in equivalent for r in mine)
        real = len(mine) - same
        yield f"| `{package}` | {len(mine)} | {killed} | {same} | {real - killed} | {killed / real:.0%} |"
    yield ""
    yield "| survived in | line | what was changed | equivalent, because |"
    yield "|---|---|---|---|"
    for mine in found.values():
        for r in mine:
            if r["fate"] not in ("killed", "timeout"):
                place = r["file"].removeprefix("src/earnest/")
                what = r["what"].replace("|", "\\|")
                yield f"| `{place}` | {r['line']} | {what} | {equivalent.get(r['key'], '')} |"


if __name__ == "__main__":
    known = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    sys.stdout.writelines(f"{row}\n" for row in rows(results(), known))

"""How many defects of public issues of 2026 does the audit detect, and does it accuse unusual right steps?

    python -m benchmarks.audit_blind [--strangers [1|…|13]] [--out FILE] [--table | --overview]

The cases of ``tests/audit/blind2026`` were written by an author who had read the declarations and the subjects'
docstrings, and no law of steps. With ``--strangers`` the cases are those of ``tests/audit/reading2026``, whose authors
had seen nothing of the audit; ``--strangers 2`` to ``13`` take those of further readers (``tests/audit/reading2026b``
to ``reading2026m``; the fourth to the seventh and the tenth have right steps only). All were committed before any of
them was audited.

``results/audit_blind_first.json`` and ``audit_blind_strangers[2|…|13]_first.json`` have the result of the first run,
before anything was changed; they are never written again. A defect counts as detected if a law fails on it that holds
on its fix, or if it raises where its fix does not. Warnings do not count, and are listed apart (since the eighth).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cases are the tests' own

from earnest_audit import audit
from tests.audit import blind2026

RESULTS = Path(__file__).parent / "results"
Reasons = tuple[Mapping[str, str], Mapping[str, str]]
STRANGERS = [f"tests.audit.reading2026{letter}" for letter in ("", *"bcdefghijklm")]
READINGS: dict[int, tuple[str, Sequence[Any], Sequence[Any], Reasons]] = {  # name, defects, right steps, reasons
    0: ("audit_blind", blind2026.CASES, blind2026.RIGHT, ({}, {})),
}
for number, package in enumerate(STRANGERS, 1):
    found, why = import_module(package).READING, import_module(f"{package}.reasons")
    end = number if number > 1 else ""
    READINGS[number] = (f"audit_blind_strangers{end}", found.cases, found.right, (why.MISSES, why.ALARMS))


def judged(make: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """The failures and the warnings of an audit, "LAW: subject" each; what could not be built or audited is one
    failure, "raises". A case that declares several subjects has the rows of all of them."""
    try:
        made = make()
        rows = [f for thing in (made if isinstance(made, list) else [made]) for f in audit(thing).findings]
    except Exception as error:
        return [f"raises: {type(error).__name__}: {error}"], []
    failed, warned = ({f"{f.law}: {f.subject}" for f in rows if f.outcome == what} for what in ("fails", "warns"))
    return sorted(failed), sorted(warned)


def run(cases: Sequence[Any], steps: Sequence[Any]) -> dict[str, list[dict[str, Any]]]:
    defects, right = [], []
    for case in cases:
        begun = time.perf_counter()
        (broken, doubts), (fixed, warned) = judged(partial(case.make, True)), judged(partial(case.make, False))
        defects.append(
            {
                "id": case.id, "source": case.source, "family": case.family, "what": case.what, "broken": broken,
                "fixed": fixed, "seen": sorted(set(broken) - set(fixed)), "doubted": sorted(set(doubts) - set(warned)),
                "warned": warned, "seconds": round(time.perf_counter() - begun, 2),
            }
        )  # fmt: skip
        print(case.id, defects[-1]["seen"] or "MISSED", fixed or "", file=sys.stderr, flush=True)
    for one in steps:
        begun = time.perf_counter()
        found, warned = judged(one.make)
        right.append(
            {
                "id": one.id, "family": one.family, "alarms": found, "warned": warned,
                "seconds": round(time.perf_counter() - begun, 2),
            }
        )  # fmt: skip
        print(one.id, found or "holds", file=sys.stderr, flush=True)
    return {"defects": defects, "right": right}


def tables(
    first: dict[str, Any], now: dict[str, Any], missed: Mapping[str, str] = {}, accused: Mapping[str, str] = {}
) -> None:
    """``missed`` and ``accused``: the reason of each miss and each false alarm, a column of its own where there are
    any."""
    families = list(Counter(d["family"] for d in first["defects"]))
    if families:
        print("| family | defects | seen at first | seen now | alarms on fixes, first | now |")
        print("|---|---|---|---|---|---|")
    for family in [*families, "all"] if families else ():
        cells: list[int] = []
        for key in ("seen", "fixed"):
            for result in (first, now):
                rows = [d for d in result["defects"] if family in (d["family"], "all")]
                cells.append(sum(bool(d[key]) for d in rows))
        print(f"| {family} | {len(rows)} | {cells[0]} | {cells[1]} | {cells[2]} | {cells[3]} |")
    print("\n| unusual right steps | steps | false alarms at first | now |\n|---|---|---|---|")
    for family in [*Counter(r["family"] for r in first["right"]), "all"]:
        both = [[r for r in result["right"] if family in (r["family"], "all")] for result in (first, now)]
        alarms = [sum(bool(r["alarms"]) for r in rows) for rows in both]
        print(f"| {family} | {len(both[0])} | {alarms[0]} | {alarms[1]} |")
    why = " why not |" if missed else ""
    if not all(d["seen"] for d in first["defects"]):
        print(f"\n| not seen at first | issue | family | what the code does | seen now |{why}")
        print(f"|---|---|---|---|---|{why and '---|'}")
    later = {d["id"]: d["seen"] for d in now["defects"]}
    for d in first["defects"]:
        if not d["seen"]:
            what = ", ".join(sorted({s.split(":")[0] for s in later[d["id"]]})) or "no"
            reason = f" {missed[d['id']]} |" if missed else ""
            print(f"| {d['id']} | {d['source']} | {d['family']} | {d['what']} | {what} |{reason}")
    why = " now | why |" if accused else ""
    print(f"\n| false alarm at first | on | laws |{why}\n|---|---|---|{why and '---|---|'}")
    left = {d["id"] for d in now["defects"] if d["fixed"]} | {r["id"] for r in now["right"] if r["alarms"]}
    found = [(d["id"], f"the fix of {d['source']}", d["fixed"]) for d in first["defects"]]
    for id, on, laws in (*found, *((r["id"], "a right step", r["alarms"]) for r in first["right"])):
        if laws:
            reason = f" {'yes' if id in left else 'no'} | {accused[id]} |" if accused else ""
            print(f"| {id} | {on} | {'; '.join(laws)} |{reason}")


def overview() -> None:
    """All readings by strangers: the defects, and the right steps: those that are unusual, and the fixes."""
    print("| reading | defects | seen at first | now | right steps | accused at first | now | warned now |")
    print("|---|---|---|---|---|---|---|---|")
    for number, (name, *_) in list(READINGS.items())[1:]:
        both = [json.loads((RESULTS / f"{name}{end}.json").read_text()) for end in ("_first", "")]
        seen = [sum(bool(d["seen"]) for d in r["defects"]) for r in both]
        accused = [sum(bool(d.get("fixed", d.get("alarms"))) for d in r["defects"] + r["right"]) for r in both]
        right = both[1]["defects"] + both[1]["right"]
        warned = sum(bool(d["warned"]) for d in right)
        cells = (number, len(both[1]["defects"]), *seen, len(right), *accused, warned)
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strangers", nargs="?", const=1, default=0, type=int, choices=range(1, len(STRANGERS) + 1),
        help="the cases whose authors had not seen the audit: which reading",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/audit_blind[_strangers[2|…|13]].json")
    parser.add_argument("--table", action="store_true", help="print the tables of recorded results, run nothing")
    parser.add_argument(
        "--overview", action="store_true", help="print how many right steps of each reading are accused"
    )
    args = parser.parse_args()
    if args.overview:
        overview()
        return
    name, cases, right, reasons = READINGS[args.strangers]
    out, first = args.out or RESULTS / f"{name}.json", RESULTS / f"{name}_first.json"
    if not args.table:
        out.write_text(json.dumps(run(cases, right), indent=1) + "\n")
        if not first.exists():
            first.write_text(out.read_text())
    tables(json.loads(first.read_text()), json.loads(out.read_text()), *reasons)


if __name__ == "__main__":
    main()

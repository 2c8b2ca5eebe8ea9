"""Print the lines of Python per package, at the end of the first edition and now, and those of later capabilities.

    python scripts/size.py

A module counts as new if git finds none at the end of the first edition that it was renamed or copied from. New modules
that belong to a later capability are counted apart; those that implement what the first edition had are not.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = "83a89f9"
"""The last commit of the first edition."""
SOURCES = ("src", "earnest-audit/src")
LATER = {
    "mistakes, clients, attackers, failures": r"diloco/(groups|signing)|serve/(attempts|connections|leases|names)",
    "own data": r"data/\w+|report/data_page|runs/own_data|tasks/(audit|from_data|graders|model_graders)",
    "schedules, full training, KTO, other teachers": r"adapters/(whole|variants/full)|config/teacher|objectives/kto"
    r"|engines/(endpoint_teacher|model_teacher|muon|schedules)|runs/best|signals/baseline",
    "agents": r"models/tool_calls|proving/conversations|replay/logs|report/conversations|serve/(grammar|tool_wire)"
    r"|rollouts/(conversing|credit|trajectory|transcript|turn_sampling)|tasks/(environment|external_openenv|isolation"
    r"|playing|processes|sandbox|sandbox_worker|tool_environment|tool_tasks|tools|verifiers_environment|worker)",
    "mesh, packing, plan, quantisation": r"adapters/split|commands/planning|diloco/mesh_outer|models/quantised|plan/\w+"
    r"|engines/(activations|compiling|mesh|optimizer_state|packing|sharding|tensor|trained)|proving/sharded|runs/ranks",
    "asynchronous sampling": r"rollouts/ledger|runs/ahead|sync/(flow|partial|process)",
    "contract of samplers": r"serve/generate|sync/(behaviour|contract/\w+)",
    "release": r"listings|report/(compare|watch)|runs/(export|measure|repeat)",
    "audit: command, pytest, reports, guessed roles": r"frontends/(command|entry|inference|layout|libraries"
    r"|names|pytest_plugin|reports)",
}
"""Capability → its modules, as paths below src/earnest or earnest_audit without ``.py``."""
FRONTS = r"audit/((frontends|watching)/.*|(watch|pulse|updates|signals|callback|trainers|script|(laws/)?__main__)\.py)"
"""The audit's modules that watch runs, meet users where they work or print, of both editions."""
SHARED = r"audit/(errors|lazy|version)\.py"
"""The audit's modules that all of earnest imports, because earnest-audit is installed without earnest; in the first
edition the errors were a file of earnest."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def package(path: str) -> str:
    """``src/earnest/runs/loop.py`` → ``runs``; the audit of both editions is ``audit``, without its front-ends."""
    inside = re.sub(r"^(src/earnest/|earnest-audit/src/earnest_)", "", path)
    if re.fullmatch(FRONTS, inside):
        return "audit, watch and front-ends"
    if re.fullmatch(SHARED, inside):
        return "(files)"
    return inside.partition("/")[0] if "/" in inside else "(files)"


def main() -> None:
    found = git("grep", "-c", "", FIRST, "--", *(f"{source}/*.py" for source in SOURCES)).splitlines()
    then = {path: int(count) for _, path, count in (line.split(":") for line in found)}
    paths = [path for source in SOURCES for path in (ROOT / source).rglob("*.py")]
    now = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    similar = ("-M40%", "-C40%", "--find-copies-harder", "-l0")
    new = set(git("diff", *similar, "--diff-filter=A", "--name-only", FIRST, "--", *SOURCES).splitlines())
    kinds = {
        path: kind
        for path in sorted(new & set(now))
        for kind, pattern in LATER.items()
        if re.fullmatch(f"(src/earnest|earnest-audit/src/earnest_audit)/({pattern}).py", path)
    }
    tables = [Counter[str]() for _ in range(3)]
    for table, counts in zip(tables, (then, now, {path: now[path] for path in kinds}), strict=True):
        for path, count in counts.items():
            table[package(path)] += count
    print(f"{'package':<46} {'then':>7} {'now':>7} {'later':>7} {'rest':>7}")
    for name in sorted(tables[0] | tables[1], key=lambda name: -tables[1][name]):
        before, after, later = (table[name] for table in tables)
        print(f"{name:<46} {before:>7,} {after:>7,} {later:>7,} {after - later:>7,}")
    before, after, later = (table.total() for table in tables)
    print(f"{'total':<46} {before:>7,} {after:>7,} {later:>7,} {after - later:>7,}\n")
    for kind in LATER:
        print(f"later: {kind:<46} {sum(now[path] for path in kinds if kinds[path] == kind):>7,}")


if __name__ == "__main__":
    main()

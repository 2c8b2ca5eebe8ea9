"""How many mutants of correct training steps does the audit detect?

    python -m benchmarks.audit_mutants [--out benchmarks/results/audit_mutants.json] [--table]

Every single-node change (a sign, a reduction, a mask, a detach, a swapped argument, an ignored setting, …) of the
losses of four correct steps (policy gradient, SFT, divergence, preference) is run through the audit. A mutant that
raises in training needs no audit. A mutant is equivalent, and not counted, if every metric is equal and the gradient is
within 1e-6 of the correct one, both unperturbed and on two perturbed, off-policy batches. The others are detected or
missed, and the missed ones are listed; an audit that ends in an error counts as missed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the correct steps are the tests' own

from earnest.mutation.operators import Mutant, mutants
from earnest_audit import Step, audit
from earnest_audit.probe import Probe
from tests.audit import steps

FAMILIES: dict[str, tuple[str, Callable[..., Step]]] = {
    "policy gradient": ("grpo_loss", steps.policy_step),
    "sft": ("sft_loss", steps.sft_step),
    "divergence": ("distill_loss", steps.distill_step),
    "preference": ("dpo_loss", steps.dpo_step),
}


def source_of(name: str) -> str:
    """The loss and the log-probs that it stands on, without docstrings."""
    parts = [inspect.getsource(steps.logprobs), inspect.getsource(getattr(steps, name))]
    tree = ast.parse("\n".join(textwrap.dedent(p) for p in parts))
    for function in tree.body:
        assert isinstance(function, ast.FunctionDef)
        function.returns = None
        for arg in function.args.args:
            arg.annotation = None
        if isinstance(function.body[0], ast.Expr):
            function.body = function.body[1:]
    return ast.unparse(tree)


def compiled(mutant: Mutant, name: str) -> Any:
    scope: dict[str, Any] = {k: getattr(steps, k) for k in ("torch", "F")}
    exec(compile(mutant.source, f"<{mutant.what}>", "exec"), scope)
    return scope[name]


SAME = 1e-6  # relative distance of two gradients of one mutant and its original


def judge(family: str, mutant: Mutant) -> tuple[str, list[str]]:
    name, make = FAMILIES[family]
    try:
        equal = equivalent(make(), make(compiled(mutant, name)))
    except Exception as error:  # the mutant's own: no audit has run yet
        return "raises", [type(error).__name__]
    if equal:
        return "equivalent", []
    try:
        laws = sorted({f.law for f in audit(make(compiled(mutant, name))).failures})
    except Exception as error:
        return "error", [type(error).__name__]
    return ("seen" if laws else "missed"), laws


def equivalent(right: Step, wrong: Step) -> bool:
    """Whether both have the same gradient, unperturbed and in two perturbed states, and the same metrics."""
    right_probe, wrong_probe = Probe(right), Probe(wrong)
    equal = True
    for size in (0.0, 0.05, 0.5):
        with right_probe.perturbed(size):
            batch = right_probe.off_policy()
            a = right_probe.gradient(batch)
        with wrong_probe.perturbed(size):
            b = wrong_probe.gradient(batch)
        equal &= a.distance(b) < SAME
    return equal and Probe(right).look().metrics == Probe(wrong).look().metrics


def plan(family: str | None = None) -> list[tuple[str, Mutant]]:
    """Every mutant of every family (or of one), in a fixed order."""
    chosen = [f for f in FAMILIES if family in (None, f)]
    return [(f, mutant) for f in chosen for mutant in mutants(source_of(FAMILIES[f][0]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/audit_mutants.json"))
    parser.add_argument("--family", choices=list(FAMILIES))
    parser.add_argument("--table", action="store_true", help="print markdown tables from --out instead of running")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())) + "\n\n" + misses(json.loads(args.out.read_text())))
        return
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for family, mutant in plan(args.family):
        outcome, laws = judge(family, mutant)
        found.append({"family": family, "line": mutant.line, "what": mutant.what, "outcome": outcome, "laws": laws})
        if outcome in ("missed", "error"):
            print(f"{outcome}: {family}, line {mutant.line}: {mutant.what} {laws}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def misses(found: list[dict[str, Any]]) -> str:
    """Every mutant that runs, differs, and breaks no law (or stops the audit), with the statement that it changes."""
    lines = ["| family | statement | what no law saw |", "|---|---|---|"]
    for f in found:
        if f["outcome"] in ("missed", "error"):
            statement = source_of(FAMILIES[f["family"]][0]).splitlines()[f["line"] - 1].strip()
            lines.append(f"| {f['family']} | `{statement.replace('|', chr(92) + '|')}` | {f['what']} |")
    return "\n".join(lines)


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| family | mutants | raise | equivalent | seen | missed | audit errs | seen of those that run and differ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in [*FAMILIES, "all"]:
        mine = [f for f in found if family in (f["family"], "all")]
        if not mine:
            continue
        count = {o: sum(f["outcome"] == o for f in mine) for o in ("raises", "equivalent", "seen", "missed", "error")}
        live = count["seen"] + count["missed"] + count["error"]
        rate = f"{count['seen'] / live:.0%}" if live else "-"
        lines.append(
            f"| {family} | {len(mine)} | {count['raises']} | {count['equivalent']} | {count['seen']} | "
            f"{count['missed']} | {count['error']} | {rate} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""How often does ``audit(model, loss, batch)`` guess the roles of a batch's tensors right?

    python -m benchmarks.audit_roles [--out benchmarks/results/audit_roles.json] [--table]

The steps of the tests of the audit are the corpus, and their declared roles are the truth: every function there that
makes a step without arguments, the four families from five seeds, and the thirty defects with their fixes. The roles
are removed and guessed again; guessing reads no names. Right steps are then audited with their guessed roles (a failure
is a false alarm), and so are the defects (a failure of a law that the defect's description names is counted as seen).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the corpus is the tests' own

import tests.audit
from earnest_audit import Step, Verdict, audit, infer
from earnest_audit.inference import InferredStep
from tests.audit.corpus import losses, machinery, policy
from tests.audit.corpus.base import DEFECTS
from tests.audit.steps import STEPS

assert losses and machinery and policy
RESULTS = Path(__file__).parent / "results" / "audit_roles.json"
FIELDS = {field.name for field in dataclasses.fields(Step)} - {"model", "loss", "batch", "roles", "settings"}
# What a user without declarations would not have written.
UNDECLARED = {
    "logprobs",
    "student",
    "terms",
    "metrics",
    "paths",
    "reference",
    "family",
    "weighed",
    "neutral",
    "switches",
}


def stripped(step: Step) -> InferredStep:
    """The step with guessed roles; its settings' values and what couples its rows stay."""
    kept = {name: getattr(step, name) for name in FIELDS - UNDECLARED}
    return infer(step.model, step.loss, step.batch, **kept)


def right_steps() -> Iterator[tuple[str, Callable[[], Any]]]:
    for family, make in STEPS.items():
        for seed in range(5):
            yield f"{family}, seed {seed}", lambda make=make, seed=seed: make(seed=seed)
    for defect in DEFECTS:
        yield f"fix {defect.id}", defect.mended
    for info in pkgutil.walk_packages(tests.audit.__path__, "tests.audit."):
        if info.name.startswith("tests.audit.corpus") or "trainers" in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, make in vars(module).items():
            if inspect.isfunction(make) and make.__module__ == info.name and _makes_a_step(make):
                yield f"{info.name.removeprefix('tests.audit.')}.{name}", make


def _makes_a_step(make: Callable[..., Any]) -> bool:
    signature = inspect.signature(make)
    required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return signature.return_annotation in ("Step", Step) and not required


def judged(
    name: str, make: Callable[[], Any], right: bool, laws: frozenset[str] = frozenset()
) -> dict[str, Any] | None:
    """One row for each tensor with a declared role; None where this is not a step with roles, or was seen before."""
    try:
        step = make()
    except TypeError:
        return None
    if not isinstance(step, Step) or not step.roles:
        return None
    found = stripped(step)
    guesses = {guess.key: guess for guess in found.inferred}
    rows = []
    for role, key in step.roles.items():
        guess = guesses.get(key)
        sure = "none" if guess is None else guess.sure
        rows.append({"role": role, "guess": None if guess is None else guess.role, "sure": sure})
    verdict: Verdict = audit(found)
    failed = sorted({f.law for f in verdict.failures})
    return {"step": name, "right": right, "rows": rows, "failed": failed, "seen": bool(laws & set(failed))}


def measure() -> list[dict[str, Any]]:
    results, seen = [], set()
    cases = [(name, make, True, frozenset[str]()) for name, make in right_steps()]
    cases += [(f"defect {d.id}", d.broken, False, d.laws) for d in DEFECTS]
    for name, make, right, laws in cases:
        if make in seen:
            continue
        seen.add(make)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = judged(name, make, right, laws)
        if row is not None:
            results.append(row)
            wrong = [f"{r['role']} as {r['guess']}" for r in row["rows"] if r["guess"] != r["role"]]
            print(f"{name}: {len(row['rows'])} roles; {', '.join(wrong) or 'all right'}; {row['failed']}", flush=True)
    return results


def table(results: list[dict[str, Any]]) -> str:
    right = [row for case in results if case["right"] for row in case["rows"]]
    lines = ["| role | tensors in right steps | right | wrong | weak or none |", "|---|---|---|---|---|"]
    for role in (*Counter(row["role"] for row in right), None):
        rows = [row for row in right if role in (None, row["role"])]
        used = [row for row in rows if row["sure"] in ("sure", "likely")]
        hits = sum(row["guess"] == row["role"] for row in used)
        lines.append(f"| {role or 'all'} | {len(rows)} | {hits} | {len(used) - hits} | {len(rows) - len(used)} |")
    lines += ["", "| how sure | guesses | right |", "|---|---|---|"]
    for sure in ("sure", "likely", "weak"):
        rows = [row for row in right if row["sure"] == sure]
        hits = sum(row["guess"] == row["role"] for row in rows)
        lines.append(f"| {sure} | {len(rows)} | {hits} |")
    fixes = [case for case in results if case["right"]]
    broken = [case for case in results if not case["right"]]
    lines += [
        "",
        "| audited with guessed roles | steps | a law fails | … one that the description names |",
        "|---|---|---|---|",
        f"| right steps | {len(fixes)} | {sum(bool(case['failed']) for case in fixes)} | |",
        f"| defects | {len(broken)} | {sum(bool(case['failed']) for case in broken)} "
        f"| {sum(case['seen'] for case in broken)} |",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the tables of the stored results")
    options = parser.parse_args()
    if not options.table:
        options.out.write_text(json.dumps(measure(), indent=1) + "\n")
    print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()

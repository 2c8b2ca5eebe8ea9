"""How often does ``audit(model, loss, batch)`` guess the roles of a batch's tensors right?

    python -m benchmarks.audit_roles [--out benchmarks/results/audit_roles.json] [--table]

The steps of the tests of the audit are the corpus, and their declared roles are the truth: every different step that a
test of a law declares, right or broken. The roles are removed and guessed again; guessing reads no names. The right
steps of the corpus (the four families from five seeds, the fixes of the thirty defects) are then audited with guessed
roles, where a failure is a false alarm, and so are the defects, where a failure of a law that the description names
counts as seen. The rules were written on the four families, so the numbers of the law tests are the ones to read.
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
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the corpus is the tests' own

import tests.audit
from earnest_audit import Setting, Step, Verdict, audit, infer
from earnest_audit.frontends.inference import InferredStep
from earnest_audit.probe import Probe
from tests.audit.corpus import losses, machinery, policy
from tests.audit.corpus.base import DEFECTS
from tests.audit.steps import STEPS

assert losses and machinery and policy
LAW_TESTS = ["tests/audit/laws", "tests/audit/test_correct_steps.py", "tests/audit/frontends"]
RESULTS = Path(__file__).parent / "results" / "audit_roles.json"
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Step)}
FIELDS = {field.name for field in dataclasses.fields(Step)} - {"model", "loss", "batch", "roles", "settings"}
# What a user without declarations would not have written.
UNDECLARED = {"logprobs", "student", "metrics", "paths", "reference", "family", "weighed"}


def stripped(step: Step) -> InferredStep:
    """The step with guessed roles; its settings' values and other declarations that differ from the default stay."""
    kept = {name: value for name in FIELDS - UNDECLARED if (value := getattr(step, name)) != DEFAULTS[name]}
    modes = {name: Setting(present, modes=others) for name, (present, *others) in step.options.items()}
    return infer(step.model, step.loss, step.batch, settings={**step.knobs, **modes}, **kept)


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


class Recorder:
    """A plugin of pytest that keeps every step that a test declares and ends each audit at its beginning."""

    def __init__(self) -> None:
        self.steps: dict[Any, Step] = {}

    def pytest_configure(self) -> None:
        own = Step.__post_init__

        def made(step: Step) -> None:
            own(step)
            if step.roles and type(step) is Step:
                code = getattr(step.loss, "__code__", None)
                place = (code.co_filename, code.co_firstlineno) if code else id(type(step.loss))
                shapes = tuple((key, tuple(getattr(t, "shape", ()))) for key, t in sorted(step.batch.items()))
                self.steps.setdefault((place, tuple(sorted(step.roles.items())), shapes), step)

        def refuse(_probe: Probe) -> Any:
            raise RuntimeError("only the declarations are wanted")

        self.restore = [(Step, "__post_init__", own), (Probe, "open", Probe.open)]
        setattr(Step, "__post_init__", made)  # noqa: B010 (mypy refuses an assignment)
        setattr(Probe, "open", refuse)  # noqa: B010

    def pytest_unconfigure(self) -> None:
        for owner, name, value in self.restore:
            setattr(owner, name, value)


def declared_in_tests() -> list[dict[str, Any]]:
    """The roles of every different step that the tests of the laws declare; right and broken ones are not told
    apart, so they are not audited."""
    recorder = Recorder()
    with redirect_stdout(sys.stderr):
        pytest.main(["-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore", *LAW_TESTS], plugins=[recorder])
    results = []
    for step in recorder.steps.values():
        try:
            found = stripped(step)
        except (Exception, KeyboardInterrupt) as error:  # a test interrupts its own step
            print(f"{step.name}: {type(error).__name__}: {error}", flush=True)
            continue
        results.append({"step": step.name, "rows": rows_of(step, found)})
        wrong = [f"{r['role']} as {r['guess']} ({r['sure']})" for r in results[-1]["rows"] if r["guess"] != r["role"]]
        if wrong:
            code = getattr(step.loss, "__code__", None)
            print(code and f"{Path(code.co_filename).name}:{code.co_firstlineno}", "; ".join(wrong), flush=True)
    return results


def rows_of(step: Step, found: InferredStep) -> list[dict[str, Any]]:
    """One row for each tensor with a declared role."""
    guesses = {guess.key: guess for guess in found.inferred}
    rows = []
    for role, key in step.roles.items():
        guess = guesses.get(key)
        sure = "none" if guess is None else guess.sure
        rows.append({"role": role, "guess": None if guess is None else guess.role, "sure": sure})
    return rows


def judged(
    name: str, make: Callable[[], Any], right: bool, laws: frozenset[str] = frozenset()
) -> dict[str, Any] | None:
    """None where this is not a step with roles."""
    try:
        step = make()
    except TypeError:
        return None
    if not isinstance(step, Step) or not step.roles:
        return None
    found = stripped(step)
    verdict: Verdict = audit(found)
    failed = sorted({f.law for f in verdict.failures})
    return {
        "step": name,
        "right": right,
        "rows": rows_of(step, found),
        "failed": failed,
        "seen": bool(laws & set(failed)),
    }


def measure() -> dict[str, list[dict[str, Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = declared_in_tests()
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
    return {"corpus": results, "tests": tests}


def by_role(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| role | tensors | right | wrong | none |", "|---|---|---|---|---|"]
    for role, _ in [*Counter(row["role"] for row in rows).most_common(), ("all", 0)]:
        mine = [row for row in rows if role in ("all", row["role"])]
        used = [row for row in mine if row["sure"] in ("sure", "likely")]
        hits = sum(row["guess"] == row["role"] for row in used)
        lines.append(f"| {role} | {len(mine)} | {hits} | {len(used) - hits} | {len(mine) - len(used)} |")
    return lines


def table(data: dict[str, list[dict[str, Any]]]) -> str:
    results = data["corpus"]
    everything = [row for case in data["tests"] for row in case["rows"]]
    lines = [*by_role(everything), "", "| how sure | guesses | right |", "|---|---|---|"]
    for sure in ("sure", "likely"):
        rows = [row for row in everything if row["sure"] == sure]
        lines.append(f"| {sure} | {len(rows)} | {sum(row['guess'] == row['role'] for row in rows)} |")
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

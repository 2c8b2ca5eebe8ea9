"""Head to head: packages from PyPI that look for silent training bugs, and earnest_audit, on the same public corpus.

    python -m benchmarks.audit_peers [--tool NAME] [--out benchmarks/results/audit_peers.json] [--table]

Every tool gets an environment of its own in ``.peers/NAME`` (its package over this environment's torch) and runs there
in a process of its own. One function per tool applies it as its README describes, to everything of the corpus that it
has an entry point for; what it has none for counts as "not covered" and not as detected.

The corpus: the thirty public defects (``tests/audit/corpus``), the forty of 2026 (``tests/audit/blind2026``) and
those of the readings by strangers (``tests/audit/reading2026*``), each beside its fix, and right steps (four families
from two seeds, and the unusual ones of all readings). A defect is detected if the tool reports something
on it that it does not report on its fix. A right step or a fix on which a tool reports a failure is a false alarm.
Warnings are counted apart. A line of declaration is one argument, or one entry of a mapping.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import time
import venv
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the corpus is the tests' own

from benchmarks.audit_blind import READINGS
from benchmarks.peers_machinery import accumulates, merged, resumes, survives, synced
from earnest_audit import Accumulation, Merge, MergedLayer, Resume, RoundTrip, Step, WeightSync, audit
from tests.audit.blind2026 import CASES, RIGHT
from tests.audit.corpus import losses, machinery, policy
from tests.audit.corpus.base import DEFECTS
from tests.audit.steps import STEPS

assert losses and machinery and policy
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "audit_peers.json"
CORPORA = {"public": "thirty", "2026": "2026", "reading": "readings"}  # how its cases' names begin -> its name
Found = tuple[list[str], list[str], int]  # failures, warnings, lines of declaration


class NotCovered(Exception):
    """The tool has no entry point for this."""


def corpus() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(name, "broken" or "fixed" or "right", what makes it)."""
    for d in DEFECTS:
        yield f"public {d.id}", "broken", d.broken
        yield f"public {d.id}", "fixed", d.mended
    for c in CASES:
        yield f"2026 {c.id}", "broken", lambda c=c: c.make(True)
        yield f"2026 {c.id}", "fixed", lambda c=c: c.make(False)
    for family, seed in itertools.product(STEPS, (0, 1)):
        yield f"{family}, seed {seed}", "right", lambda f=family, s=seed: STEPS[f](seed=s)
    for r in RIGHT:
        yield f"unusual {r.id}", "right", r.make
    for number, (_, cases, right, _) in list(READINGS.items())[1:]:
        for c in cases:
            yield f"reading {number} {c.id}", "broken", lambda c=c: c.make(True)
            yield f"reading {number} {c.id}", "fixed", lambda c=c: c.make(False)
        for r in right:
            yield f"reading {number} {r.id}", "right", r.make


class Whole(nn.Module):
    """A declared step as the module that most tools expect: tensors in, {"loss": …} (and log-probs) out."""

    def __init__(self, step: Step, outputs: bool) -> None:
        super().__init__()
        self.model, self.step, self.outputs = step.model, [step], outputs

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        step = self.step[0]
        batch = {**step.batch, **tensors}
        settings = {**step.knobs, **{name: modes[0] for name, modes in step.options.items()}}
        value = step.loss(self.model, batch, **settings)
        value = value[0] if isinstance(value, tuple) else value
        loss = value if isinstance(value, Tensor) else value["loss"]
        found = step.logprobs(self.model, batch) if self.outputs and step.logprobs is not None else None
        return {"loss": loss, **({"logprobs": found} if isinstance(found, Tensor) else {})}


def tensors_of(step: Step) -> dict[str, Tensor]:
    return {name: t for name, t in step.batch.items() if isinstance(t, Tensor)}


def optimizer_of(step: Step) -> torch.optim.Optimizer:
    return step.optimizer or torch.optim.AdamW([p for p in step.model.parameters() if p.requires_grad], lr=1e-3)


def a_step(thing: Any) -> Step:
    if not isinstance(thing, Step):
        raise NotCovered
    return thing


def earnest(thing: Any) -> Found:
    verdict = audit(thing)
    if isinstance(thing, Step):
        mappings = ("roles", "settings", "weighed", "paths", "metrics")
        lines = 3 + sum(len(getattr(thing, name)) for name in mappings)
        others = {"model", "loss", "batch", "name", "seed", *mappings}
    else:
        lines, others = 0, set()
    for field in fields(thing):
        value = getattr(thing, field.name)
        empty = value is None or (isinstance(value, Mapping | Sequence) and not value)
        lines += field.name not in others and value is not field.default and not empty
    failed, warned = ([f"{f.law}: {f.subject}" for f in rows] for rows in (verdict.failures, verdict.warnings))
    return failed, warned, lines


def guardtower(thing: Any) -> Found:
    tool = import_module("guardtower")
    step = a_step(thing)
    whole = Whole(step, outputs=False).train()
    report = tool.audit(step.model, lambda: whole()["loss"], optimizer=optimizer_of(step))
    return [f.check for f in report.errors], [f.check for f in report.warnings], 3


def torchtest2(thing: Any) -> Found:
    """Ids and masks are the inputs, as integers; real-valued tensors are the targets: of an input, every feature has to
    matter, which is not so for the log-probs of padding."""
    tool = import_module("torchtest2")
    step = a_step(thing)
    tensors = tensors_of(step)
    masks = {k for k, t in tensors.items() if t.is_floating_point() and bool(((t == 0) | (t == 1)).all())}
    inputs = {k: t.long() if k in masks else t for k, t in tensors.items() if k in masks or not t.is_floating_point()}
    rest = {k: t for k, t in tensors.items() if k not in inputs}

    def run(model: nn.Module, given: Mapping[str, Tensor], _targets: Any = None) -> Any:
        return model(**{k: t.to(tensors[k].dtype) for k, t in given.items()}, **rest)

    can_reach_zero = step.kind == "sft"  # a policy gradient and a preference loss have no floor that a batch reaches
    report = tool.check_model(
        Whole(step, outputs=True),
        inputs,
        optimizer=optimizer_of(step),
        overfit_steps=200 if can_reach_zero else 0,
        overfit_ratio=0.5,
        forward_fn=run,
        eval_forward_fn=run,
    )
    return [r.name for r in report.failures], [r.name for r in report.warnings], 7


def torch_audit(thing: Any) -> Found:
    step = a_step(thing)
    optimizer = optimizer_of(step)
    whole = Whole(step, outputs=False)
    auditor = import_module("torch_audit").autopatch(step.model, optimizer=optimizer, every_n_steps=1, reporters=[])
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        whole()["loss"].backward()
        optimizer.step()
    findings = auditor.finish().findings
    auditor.unpatch()
    level = {f"{f.rule_id}: {f.entity or f.module_path}": f.severity.value for f in findings}
    failed = [name for name, severity in level.items() if severity in ("ERROR", "FATAL")]
    return failed, [name for name, severity in level.items() if severity == "WARN"], 3


def preflight(thing: Any) -> Found:
    step = a_step(thing)
    whole = Whole(step, outputs=False)
    inputs = next((step.batch[step.roles[r]] for r in ("ids", "chosen") if r in step.roles), None)
    if inputs is None:
        raise NotCovered
    results = import_module("preflight.runner").run_checks(
        dataloader=[(inputs, step.batch.get("labels", inputs))],
        model=Called(whole),
        loss_fn=lambda output, targets: output,
    )
    failed = [r for r in results if not r.passed]
    fatal = [r.name for r in failed if r.severity.value == "fatal"]
    return fatal, [r.name for r in failed if r.severity.value == "warn"], 3


class Called(nn.Module):
    """The whole batch's loss, whatever rows it is called with."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, _rows: Tensor) -> Tensor:
        return self.whole()["loss"]


def pytest_torch(thing: Any) -> Found:
    """The assertions of the guides "training sanity", "training loops", "inference" and "deployment parity"."""
    pt = import_module("pytest_torch")
    failed: list[str] = []
    checks: list[tuple[str, Callable[[], Any]]] = []
    if isinstance(thing, Step):
        whole, inputs = Whole(thing, outputs=False).eval(), tensors_of(thing)
        loss: Callable[[Any], Tensor] = lambda out: out["loss"]  # noqa: E731
        ids, attention = thing.roles.get("ids"), thing.roles.get("attention")
        idle = [f"model.{pattern}" for pattern in thing.may_idle]
        checks += [
            ("gradients finite", lambda: pt.assert_gradients_finite(whole, inputs, loss)),
            ("all params", lambda: pt.assert_all_params_receive_grad(whole, inputs, loss, ignore=idle)),
            ("coverage", lambda: pt.assert_optimizer_coverage(thing.model, optimizer_of(thing))),
            ("deterministic", lambda: pt.assert_deterministic(whole, inputs)),
        ]
        if thing.value_is_loss is not False:  # the value of a surrogate may rise
            fall = {"lr": 1e-2, "min_relative_decrease": 0.0}
            checks.append(("decreases", lambda: pt.assert_loss_decreases(whole, inputs, loss, **fall)))
        if ids and attention:
            keys = {"ids_key": ids, "mask_key": attention}
            checks.append(("mask invariant", lambda: pt.assert_mask_invariant(whole, inputs, **keys)))
            if "labels" not in thing.roles:  # it would pad them with a token's id
                checks.append(("padding invariant", lambda: pt.assert_padding_invariant(whole, inputs, **keys)))
        for name, path in thing.paths.items():
            other = lambda p=path: p(thing.model, thing.batch, **thing.knobs)  # noqa: E731
            checks.append((f"path {name}", lambda o=other: pt.assert_outputs_close(o(), whole()["loss"])))
        frozen = [f"model.{name}" for name, p in thing.model.named_parameters() if not p.requires_grad]
        if frozen:
            checks.append(("frozen", lambda: pt.assert_frozen(whole, inputs, loss, frozen)))
    elif isinstance(thing, Accumulation) and not thing.rows_interact:
        checks.append(("accumulation", lambda: accumulates(pt, thing)))
    elif isinstance(thing, Resume):
        checks.append(("resume", lambda: resumes(pt, thing)))
    elif isinstance(thing, RoundTrip):
        checks.append(("checkpoint", lambda: survives(pt, thing)))
    elif isinstance(thing, WeightSync):
        checks.append(("parity", lambda: synced(pt, thing)))
    elif isinstance(thing, Merge) and thing.applied is not None:
        applied = thing.applied
        checks.append(("parity", lambda: pt.assert_outputs_close(thing.delta(1.0), applied(1.0))))
    elif isinstance(thing, MergedLayer):
        checks.append(("parity", lambda: merged(pt, thing)))
    if not checks:
        raise NotCovered
    for name, check in checks:
        try:
            check()
        except AssertionError:
            failed.append(name)
        except (ValueError, RuntimeError, IndexError, KeyError, TypeError) as error:
            logging.info("%s does not apply: %s", name, error)
    return failed, [], 3 + len(checks)


TOOLS: dict[str, tuple[Callable[[Any], Found], str]] = {
    "earnest": (earnest, "earnest-audit"),
    "guardtower": (guardtower, "guardtower"),
    "torchtest2": (torchtest2, "torchtest2"),
    "torch-audit": (torch_audit, "torch-audit"),
    "preflight-ml": (preflight, "preflight-ml"),
    "pytest-torch": (pytest_torch, "pytest-torch"),
}


def every(function: Callable[[Any], Found], thing: Any) -> Found:
    """What is reported on each of several declarations of one case that the tool has an entry point for."""
    things, found = thing if isinstance(thing, list) else [thing], []
    for one in things:
        with contextlib.suppress(NotCovered):
            found.append(function(one))
    if not found:
        raise NotCovered
    failed, warned = ([row for f in found for row in f[i]] for i in (0, 1))
    return failed, warned, sum(f[2] for f in found)


def apply(tool: str) -> dict[str, Any]:
    """All of the corpus through one tool, in this process."""
    function, package = TOOLS[tool]
    rows = []
    for name, kind, make in corpus():
        begun = time.perf_counter()
        row: dict[str, Any] = {"case": name, "kind": kind}
        try:
            thing = make()
            begun = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                failed, warned, lines = every(function, thing)
            row |= {"failures": sorted(set(failed)), "warnings": sorted(set(warned)), "lines": lines}
        except NotCovered:
            row |= {"failures": [], "warnings": [], "covered": False}
        except Exception as error:
            row |= {"failures": [], "warnings": [], "error": f"{type(error).__name__}: {error}"[:200]}
        rows.append({**row, "seconds": round(time.perf_counter() - begun, 3)})
        print(tool, name, kind, row["failures"] or row.get("error", ""), file=sys.stderr, flush=True)
    return {"package": package, "version": "this repository" if tool == "earnest" else version(package), "rows": rows}


def environment(name: str, packages: Sequence[str] = (), dependencies: bool = False) -> Path:
    """The Python of an environment of its own, with these packages over this environment's."""
    if not packages:
        return Path(sys.executable)
    folder = ROOT / ".peers" / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        own = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (own / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    limits = ["-c", ROOT / "constraints.txt"] if dependencies else ["--no-deps"]  # neither replaces torch
    subprocess.run([python, "-m", "pip", "install", "-q", *limits, *packages], check=True)
    return python


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of one tool, over what it has an entry point for."""
    rows = [r for r in result["rows"] if r.get("covered", True)]
    fixed = {r["case"]: r for r in rows if r["kind"] == "fixed"}
    broken = [r for r in rows if r["kind"] == "broken"]
    right = [r for r in rows if r["kind"] != "broken"]

    def new(r: Mapping[str, Any], *keys: str) -> bool:
        return any(set(r[k]) - set(fixed[r["case"]][k] if r["case"] in fixed else ()) for k in keys)

    def seen(corpus: str) -> int:
        return sum(new(r, "failures") for r in broken if r["case"].startswith(corpus))

    ran = [r for r in rows if "error" not in r]
    lines, seconds = [r["lines"] for r in ran], sorted(r["seconds"] for r in ran if "seconds" in r)
    return {
        **{corpus: seen(corpus) for corpus in CORPORA},
        "warned": sum(new(r, "warnings") and not new(r, "failures") for r in broken),
        "defects": len(broken), "right": len(right),
        "alarms": sum(bool(r["failures"]) for r in right),
        "warning alarms": sum(bool(r["warnings"]) and not r["failures"] for r in right),
        "seconds": seconds[len(seconds) // 2] if seconds else 0.0,
        "lines": sum(lines) / len(lines) if lines else 0.0,
    }  # fmt: skip


def tables(results: Mapping[str, Any]) -> None:
    counts = {tool: summary(results[tool]) for tool in results}
    sizes = [sum(n.startswith(c) for n in {n for n, kind, _ in corpus() if kind == "broken"}) for c in CORPORA]
    names = " | ".join(f"{name} ({size})" for name, size in zip(CORPORA.values(), sizes, strict=True))
    print(
        f"| tool | defects (of {sum(sizes)}) | {names} |"
        " warned | right steps | false alarms | warned | seconds | lines |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for tool, c in counts.items():
        name = "earnest_audit" if tool == "earnest" else f"{tool} {results[tool]['version']}"
        took = f"{c['seconds']:.2f}" if c["seconds"] else "-"
        print(
            f"| {name} | {c['defects']} | {' | '.join(str(c[n]) for n in CORPORA)} | {c['warned']} | {c['right']} |"
            f" {c['alarms']} | {c['warning alarms']} | {took} | {c['lines']:.1f} |"
        )
    found = {tool: {r["case"] for r in results[tool]["rows"] if detected(r, results[tool]["rows"])} for tool in results}
    print("\n| tool | defects that it detects and earnest_audit does not |\n|---|---|")
    for tool in results:
        if tool != "earnest":
            print(f"| {tool} | {', '.join(sorted(found[tool] - found.get('earnest', set()))) or 'none'} |")


def detected(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether something is reported on a defect that is not reported on its fix."""
    if row["kind"] != "broken":
        return False
    fixed = next((r["failures"] for r in rows if r["case"] == row["case"] and r["kind"] == "fixed"), ())
    return bool(set(row["failures"]) - set(fixed))


def text(results: Mapping[str, Any]) -> str:
    """As JSON, one row of a tool in one line."""
    tools = []
    for name, result in results.items():
        rows = ",\n".join(json.dumps(row) for row in result["rows"])
        head = json.dumps({k: v for k, v in result.items() if k != "rows"})[:-1]
        tools.append(f'{json.dumps(name)}: {head}, "rows": [\n{rows}\n]}}')
    return "{\n" + ",\n".join(tools) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=list(TOOLS), help="only this one; the others' results stay")
    parser.add_argument("--here", choices=list(TOOLS), help="apply one tool in this process and print its JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the tables of recorded results, run nothing")
    args = parser.parse_args()
    if args.here:
        json.dump(apply(args.here), sys.stdout)
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for tool in [] if args.table else args.tool or list(TOOLS):
        packages = [] if tool == "earnest" else [TOOLS[tool][1]]
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "earnest-audit" / "src")])
        done = subprocess.run(
            [environment(tool, packages, True), Path(__file__), "--here", tool],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        results[tool] = json.loads(done.stdout)
        args.out.write_text(text(results))
    tables(results)


if __name__ == "__main__":
    main()

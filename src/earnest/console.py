"""What the commands print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from earnest.errors import EarnestError, nearest

if TYPE_CHECKING:
    from earnest.audit.verdict import Verdict
    from earnest.objectives.registry import TermInfo


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", header_style="bold", show_lines=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    """A row of data: brackets in it are brackets."""
    table.add_row(*(escape(cell) for cell in cells))


def run(
    recipe: str, overrides: list[str], resume: bool, full: bool = False, on: str = "local", dry_run: bool = False
) -> None:
    """Train, then say what came of it and what to do next."""
    from earnest import config
    from earnest.config import recipes as known
    from earnest.runs import resume as resume_run
    from earnest.runs import start
    from earnest.runs.errors import Interrupted

    out = Console()
    if not resume or recipe in known.names() or Path(recipe).suffix in (".yaml", ".yml"):
        name, data = known.read(recipe)
        if "experiment" in data:
            experiment = known.experiments(name)
            page = experiment.run(name, data, overrides, full=full, resume=resume, console=out)
            out.print(f"{'report':<16} {page}", markup=False, highlight=False, soft_wrap=True)
            return
    if full:
        raise EarnestError(f"--full: {recipe} is one run and has no longer form; leave it out, or raise steps=.")
    try:
        if resume:
            finished = resume_run(Path(recipe), overrides, out)
        else:
            name, settings = config.load(recipe, overrides)
            if on != "local" or dry_run:
                if not settings.replicated:
                    raise EarnestError("--on and --dry-run are about replicas; add replicas=N, or leave them out.")
                from earnest.diloco import run as replicas

                if dry_run:
                    print(replicas.dry_run(name, settings, on))
                    return
                finished = replicas.start(name, settings, out, on=on)
            else:
                finished = start(name, settings, out)
    except Interrupted as stop:
        print(f"earnest: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)
    out.print()
    out.print(
        f"held-out reward  {_pm(finished.before, finished.before_se)} → "
        f"[bold green]{_pm(finished.after, finished.after_se)}[/]",
        highlight=False,
    )
    out.print(
        f"gain             {_pm(finished.gain, finished.gain_se, '+')}  "
        f"[dim](standard errors over {finished.prompts} prompts, {finished.samples} completions)[/]",
        highlight=False,
    )
    out.print(f"training took    {finished.seconds:.0f} s", highlight=False)
    for what, value in (("report", finished.report), ("chat with it", f"earnest chat --adapter {finished.folder}")):
        out.print(f"{what:<16} {value}", markup=False, highlight=False, soft_wrap=True)


def worker(url: str, replica: int | None, folder: Path | None) -> None:
    """Be a replica until its run is over."""
    from earnest.diloco.worker import work
    from earnest.runs.errors import Interrupted

    out = Console()
    try:
        number = work(url, replica, folder, out)
    except Interrupted as stop:
        print(f"earnest: stopped after step {stop.step}; join again with: earnest worker {url}", file=sys.stderr)
        sys.exit(stop.exit_code)
    out.print(f"replica {number}: the run is over", highlight=False)


def _pm(value: float, se: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if se is None else f" ± {se:.3f}")


def audit(recipe: str, overrides: list[str], as_json: bool, quick: bool = False) -> int:
    """Print the verdict on a recipe's step; 1 where it does not hold."""
    from earnest import config
    from earnest.config import recipes
    from earnest.runs import check

    name, data = recipes.read(recipe)
    if "experiment" in data:
        found = recipes.experiments(name).check(data, overrides, quick=quick, console=Console(stderr=True))
    else:
        found = check(config.load(recipe, overrides)[1], Console(stderr=True), quick=quick)
    return _judge(found, as_json)


def audit_script(path: Path, arguments: list[str], as_json: bool, quick: bool) -> int:
    """Run a script under the audit and print the verdict; its own output goes to stderr."""
    from contextlib import redirect_stdout

    from earnest.audit.script import audit_script as run_script

    out = Console(stderr=True)
    with redirect_stdout(sys.stderr):
        verdict = run_script(
            path, arguments, quick=quick,
            progress=lambda text: out.print(f"{text} …", style="dim", markup=False, highlight=False, soft_wrap=True),
        )  # fmt: skip
    return _judge(verdict, as_json)


def score_tests(tests: Path, source: Path | None, limit: int | None, out: Path | None, as_json: bool) -> int:
    """Print which mutants of ``source`` the tests do not see; 1 where there are any."""
    from earnest.audit.mutation import score_tests as score

    if source is None:
        raise EarnestError("--tests needs --source: the file or folder of training code that the tests are about.")
    progress = Console(stderr=True)
    found = score(tests, source, out=out, limit=limit, progress=lambda line: progress.print(line, markup=False))
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print(found.table())
        for o in found.survivors:
            print(f"survived: {o.file}:{o.line}: {o.what}")
    return 1 if found.survivors else 0


def _judge(verdict: Verdict, as_json: bool) -> int:
    if as_json:
        print(json.dumps(verdict.to_dict(), indent=1))
    else:
        Console().print(verdict)
    return 0 if verdict.holds else 1


def report(run_dir: Path) -> None:
    """Write the page and say where it is."""
    from earnest import report as pages

    out = Console()
    page = pages.write(run_dir)
    out.print(pages.summary(run_dir))
    out.print(str(page), markup=False, highlight=False, soft_wrap=True)


def recipes() -> None:
    from earnest import config
    from earnest.objectives import describe

    papers = {info.kind: info.paper for info in describe()}
    table = _table("earnest run RECIPE", "recipe", "what it does", "model", "task", "objective")
    for r in config.list_recipes():
        terms = "\n".join(f"{kind} ({papers[kind]})" for kind in r.objective)
        _row(table, r.name, r.description, r.model, r.task, terms)
    Console().print(table)


def _reads(info: TermInfo) -> str:
    """Roles and signals; in brackets the setting with which a signal is read, too."""
    return ", ".join([*info.roles, *info.signals, *(f"{signal} ({when})" for signal, when in info.more_signals)])


def objectives(kind: str | None) -> None:
    from earnest.objectives import describe

    infos = {info.kind: info for info in describe()}
    if kind is not None:
        if kind not in infos:
            raise EarnestError(f"objective {kind!r} is unknown: {nearest(kind, infos)}")
        info = infos[kind]
        title = f"{info.kind}: {info.summary}\n{info.equation}\n{info.paper}\nreads {_reads(info)}"
        table = _table(title, "field", "default", "allowed", "meaning")
        for field in info.fields:
            _row(table, field.name, field.default, field.allowed, field.doc)
        Console().print(table)
        return
    table = _table("objective: [{kind: …, weight: …}]", "kind", "what it is", "paper", "reads", "fields")
    for info in infos.values():
        _row(
            table,
            info.kind,
            f"{info.summary}\n{info.equation}",
            info.paper,
            _reads(info),
            ", ".join(f.name for f in info.fields),
        )
    Console().print(table)


def adapters(check: bool, compile: bool = False) -> int:
    """List the adapters, or run their conformance checks; 1 where one fails."""
    if check or compile:
        return _check_adapters(compile)
    from earnest.adapters import list_variants

    table = _table("adapter: {kind: …}", "kind", "equation", "paper", "reference", "lr", "fields")
    for row in list_variants():
        fields = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        lr = f"{row['lr']:g} ({row['lr_source']})"
        _row(table, row["name"], row["equation"], row["paper"], row["reference"], lr, fields)
    Console().print(table)
    return 0


def _check_adapters(compile: bool) -> int:
    from rich.progress import track

    from earnest.adapters import conformance

    subjects = list(conformance.SUBJECTS)
    rows = conformance.run(subjects, compile=compile)
    found = track(rows, "checking", len(subjects), console=Console(stderr=True), transient=True)
    table = _table("every adapter on every model and precision", *conformance.COLUMNS)
    broken: list[str] = []
    for row in found:
        _row(table, *conformance.cells(row))
        broken += [f"{row.variant}: {fault}" for fault in row.faults]
    out = Console()
    out.print(table)
    for fault in broken:
        out.print(f"✗ {fault}", style="red", markup=False)
    return 1 if broken else 0


def tasks() -> None:
    from earnest.tasks import list_tasks

    table = _table("task: NAME", "task", "what it is", "from")
    for info in list_tasks():
        _row(table, info.name, info.description, info.source if info.available else f"{info.source} (not installed)")
    Console().print(table)


def models() -> None:
    from earnest.models import list_models

    table = _table(
        "model: NAME, a Hugging Face id, or a folder",
        "model",
        "what it is",
        "parameters",
        "licence",
        "offline",
        "where",
    )
    for info in list_models():
        _row(
            table,
            info.name,
            info.what,
            f"{info.parameters:,}",
            info.licence,
            "yes" if info.offline else "no",
            info.where,
        )
    Console().print(table)

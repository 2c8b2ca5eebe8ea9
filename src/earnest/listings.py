"""The tables of the commands that list: ``earnest recipes``, ``objectives``, ``adapters``, ``tasks``, ``models``,
``runs`` and ``doctor``. A listing is printed as a table, or with ``--json`` as records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from earnest.objectives.registry import TermInfo
    from earnest.settings import FieldInfo
    from earnest.tasks import Environment


WIDE = 6
"""A table of more columns has no lines between them and no empty column, and only its texts (``WRAPPED``) are broken
into several lines, so that the columns of `earnest runs` fit in a terminal of 80."""
WRAPPED = ("run", "task", "finding")


@dataclass
class Listing:
    """Rows of texts under named columns. ``copied``: the first column has names for copying, so it is never wrapped."""

    title: str
    columns: tuple[str, ...]
    copied: bool = True
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self.columns), f"{cells} for {self.columns}"
        self.rows.append(cells)

    def records(self) -> list[dict[str, str]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def __rich__(self) -> Table:
        table = Table(title=escape(self.title), title_justify="left", header_style="bold", show_lines=False)
        if len(self.columns) > WIDE:
            table.box, table.padding = None, (0, 1, 0, 0)
        wide = len(self.columns) > WIDE
        shown = [place for place in range(len(self.columns)) if not wide or any(row[place] for row in self.rows)]
        for place in shown:
            fixed = wide and self.columns[place] not in WRAPPED
            table.add_column(self.columns[place], overflow="fold", no_wrap=fixed or (self.copied and place == 0))
        for row in self.rows:
            table.add_row(*(escape(row[place]) for place in shown))
        return table


def recipes() -> Listing:
    """Every recipe and experiment of `earnest run`."""
    from earnest import config
    from earnest.objectives import describe

    papers = {info.kind: info.paper for info in describe()}
    table = Listing("earnest run RECIPE", ("recipe", "what it does", "model", "task", "objective"))
    for r in config.list_recipes():
        terms = "\n".join(f"{kind} ({papers[kind]})" for kind in r.objective)
        table.add(r.name, r.description, r.model, r.task, terms)
    return table


def _reads(info: TermInfo) -> str:
    """Roles and signals; in brackets the setting with which a term reads another signal."""
    return ", ".join([*info.roles, *info.signals, *(f"{signal} ({when})" for signal, when in info.more_signals)])


def objectives() -> Listing:
    """Every term of a loss."""
    from earnest.objectives import describe

    table = Listing("objective: [{kind: …, weight: …}]", ("kind", "what it is", "paper", "reads", "fields"))
    for info in describe():
        fields = ", ".join(f.name for f in info.fields)
        table.add(info.kind, f"{info.summary}\n{info.equation}", info.paper, _reads(info), fields)
    return table


def objective(kind: str) -> Listing:
    """The fields of one term."""
    from earnest.objectives.registry import OBJECTIVES, info_of

    info = info_of(OBJECTIVES.find(kind))
    return _fields(f"{kind}: {info.summary}\n{info.equation}\n{info.paper}\nreads {_reads(info)}", info.fields)


def adapter(kind: str) -> Listing:
    """The fields of one adapter."""
    from earnest.adapters.variant import VARIANTS
    from earnest.settings import field_infos

    variant = VARIANTS.find(kind)
    summary = (variant.__doc__ or "").strip().splitlines()[0]
    return _fields(f"{kind}: {summary}\n{variant.equation}\narXiv {variant.paper}", field_infos(variant))


def _fields(title: str, infos: Iterable[FieldInfo]) -> Listing:
    table = Listing(title, ("field", "default", "allowed", "meaning"))
    for info in infos:
        table.add(info.name, info.default, info.allowed, info.doc)
    return table


def adapters() -> Listing:
    """Every adapter with its paper and its learning rate."""
    from earnest.adapters import list_variants

    table = Listing("adapter: {kind: …}", ("kind", "equation", "paper", "reference", "lr", "fields"))
    for row in list_variants():
        fields = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        lr = f"{row['lr']:g} ({row['lr_source']})"
        table.add(row["name"], row["equation"], row["paper"], row["reference"], lr, fields)
    return table


def checked_adapters(compile: bool) -> tuple[Listing, list[str]]:
    """Run the conformance checks with a bar on stderr: their results, and a line for each failure."""
    from rich.progress import track

    from earnest.adapters import conformance

    subjects = list(conformance.SUBJECTS)
    found = conformance.run(subjects, compile=compile)
    rows = track(found, "checking", len(subjects), console=Console(stderr=True), transient=True)
    table = Listing("every adapter on every model and precision", tuple(conformance.COLUMNS))
    failures: list[str] = []
    for row in rows:
        table.add(*conformance.cells(row))
        failures += [f"{row.variant}: {fault}" for fault in row.faults]
    return table, failures


GYM = "reasoning_gym"


def tasks(family: str | None = None, *, datasets: bool = False) -> Listing:
    """Every task that has a name here. The datasets of reasoning-gym share one row, unless they are the wanted
    ``family``, or ``datasets`` is set."""
    from earnest.tasks import list_tasks
    from earnest.tasks.base import TaskInfo

    table = Listing("task: NAME", ("task", "what it is", "from"))
    infos = list_tasks()
    gym = [info for info in infos if info.name.startswith(f"{GYM}/")]
    if family == GYM:
        infos = gym
    elif len(gym) > 1 and not datasets:
        words = f"{len(gym)} datasets; `earnest tasks {GYM}` lists them"
        infos = [*(i for i in infos if i not in gym), TaskInfo(f"{GYM}/<dataset>", words, gym[0].source)]
    for info in infos:
        table.add(info.name, info.description, info.source if info.available else f"{info.source} (not installed)")
    return table


def task(name: str) -> list[Listing]:
    """One task: its description, its settings, and three prompts with the grades of the right and an empty answer."""
    from earnest.tasks import get_task, is_environment
    from earnest.tasks.external_reasoning_gym import ReasoningGym

    found = get_task(name)
    parts: list[Listing] = []
    if isinstance(found, ReasoningGym):
        settings = Listing(f"task: {{name: {name}, …}}", ("setting", "default"))
        for key, value in found.options().items():
            settings.add(key, str(value))
        parts.append(settings)
    either: object = found  # a name may also be that of an environment
    if is_environment(either):
        return [*parts, _environment(either)]
    examples = Listing(
        f"{found.name}: {found.description}\nthree held-out prompts",
        ("prompt", "completion", "reward", "feedback"),
        False,
    )
    for prompt in found.prompts("heldout", 3, 0):
        answer = prompt.data.get("answer")
        for completion in ([] if answer is None else [str(answer)]) + [""]:
            grade = found.grade(prompt, completion)
            text = "\n".join(str(m.get("content")) for m in prompt.messages)
            examples.add(text, completion or "(empty)", f"{grade.reward:g}", grade.feedback)
    return [*parts, examples]


def _environment(found: Environment) -> Listing:
    """The tools and three held-out prompts of an environment."""
    names = [tool.get("function", tool).get("name", "?") for tool in found.tools]
    title = f"{found.name}: {found.description}\ntools: {', '.join(names) or 'none'}"
    table = Listing(title, ("held-out prompt", "text"), False)
    for prompt in found.prompts("heldout", 3, 0):
        table.add(prompt.id, "\n".join(str(m.get("content")) for m in prompt.messages))
    return table


def models() -> Listing:
    """Every model that has a name here."""
    from earnest.models import list_models

    columns = ("model", "what it is", "parameters", "licence", "offline", "where")
    table = Listing("model: NAME, a Hugging Face id, or a folder", columns)
    for info in list_models():
        offline = "yes" if info.offline else "no"
        table.add(info.name, info.what, f"{info.parameters:,}", info.licence, offline, info.where)
    return table


def runs(folder: Path) -> Listing:
    """Every run below ``folder``, newest first: state, held-out numbers, and what its laws or its watch found."""
    from earnest.errors import ConfigError
    from earnest.report.load import load
    from earnest.report.record import ReportError, Run
    from earnest.report.watch import concern

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of your runs, as in `earnest runs runs`.")
    columns = ("run", "task", "status", "finding", "steps", "measure", "before", "best", "after", "started")
    table = Listing(f"runs in {folder}", columns, False)
    found: list[tuple[str, Run]] = []
    for path in sorted(folder.glob("**/run.json")):
        try:
            run = load(path.parent)
        except ReportError as error:
            table.add(str(path.parent.relative_to(folder)), "", "unreadable", str(error), *[""] * 6)
        else:
            found.append((run.header.started, run))
    for started, run in sorted(found, key=lambda pair: pair[0], reverse=True):
        values = [e.value for e in run.evaluations if e.value is not None]
        trained = values[1:]  # the first evaluation is before training
        best = [(min if run.measure == "loss" else max)(trained)] if trained else []
        numbers = [f"{number:.3f}" for number in (*values[:1], *best, *trained[-1:])]
        place, head = str(run.folder.relative_to(folder)), run.header
        steps = f"{head.steps_done}/{head.steps}"
        row = (place, head.task, head.status, concern(run) or "", steps, run.measure, *[*numbers, "", "", ""][:3])
        table.add(*row, started[5:16].replace("T", " "))
    return table

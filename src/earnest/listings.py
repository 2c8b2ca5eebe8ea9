"""The tables of ``earnest recipes``, ``objectives``, ``adapters``, ``tasks`` and ``models``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from earnest.objectives.registry import TermInfo
    from earnest.settings import FieldInfo


def _table(title: str, *columns: str, names: bool = True) -> Table:
    """An empty table. ``names``: the first column has names for copying, so it is never wrapped."""
    table = Table(title=escape(title), title_justify="left", header_style="bold", show_lines=False)
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=names and place == 0)
    return table


def _row(table: Table, *cells: str) -> None:
    """Add a row; brackets in the cells are text, not markup."""
    table.add_row(*(escape(cell) for cell in cells))


def recipes() -> Table:
    """Every recipe and experiment of `earnest run`."""
    from earnest import config
    from earnest.objectives import describe

    papers = {info.kind: info.paper for info in describe()}
    table = _table("earnest run RECIPE", "recipe", "what it does", "model", "task", "objective")
    for r in config.list_recipes():
        terms = "\n".join(f"{kind} ({papers[kind]})" for kind in r.objective)
        _row(table, r.name, r.description, r.model, r.task, terms)
    return table


def _reads(info: TermInfo) -> str:
    """Roles and signals; in brackets the setting with which a term reads another signal."""
    return ", ".join([*info.roles, *info.signals, *(f"{signal} ({when})" for signal, when in info.more_signals)])


def objectives() -> Table:
    """Every term of a loss."""
    from earnest.objectives import describe

    table = _table("objective: [{kind: …, weight: …}]", "kind", "what it is", "paper", "reads", "fields")
    for info in describe():
        fields = ", ".join(f.name for f in info.fields)
        _row(table, info.kind, f"{info.summary}\n{info.equation}", info.paper, _reads(info), fields)
    return table


def objective(kind: str) -> Table:
    """The fields of one term."""
    from earnest.objectives.registry import OBJECTIVES, info_of

    info = info_of(OBJECTIVES.find(kind))
    return _fields(f"{kind}: {info.summary}\n{info.equation}\n{info.paper}\nreads {_reads(info)}", info.fields)


def adapter(kind: str) -> Table:
    """The fields of one adapter."""
    from earnest.adapters.variant import VARIANTS
    from earnest.settings import field_infos

    variant = VARIANTS.find(kind)
    summary = (variant.__doc__ or "").strip().splitlines()[0]
    return _fields(f"{kind}: {summary}\n{variant.equation}\narXiv {variant.paper}", field_infos(variant))


def _fields(title: str, infos: Iterable[FieldInfo]) -> Table:
    table = _table(title, "field", "default", "allowed", "meaning")
    for field in infos:
        _row(table, field.name, field.default, field.allowed, field.doc)
    return table


def adapters() -> Table:
    """Every adapter with its paper and its learning rate."""
    from earnest.adapters import list_variants

    table = _table("adapter: {kind: …}", "kind", "equation", "paper", "reference", "lr", "fields")
    for row in list_variants():
        fields = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        lr = f"{row['lr']:g} ({row['lr_source']})"
        _row(table, row["name"], row["equation"], row["paper"], row["reference"], lr, fields)
    return table


def checked_adapters(compile: bool) -> tuple[Table, list[str]]:
    """Run the conformance checks with a bar on stderr: their results, and a line for each failure."""
    from rich.progress import track

    from earnest.adapters import conformance

    subjects = list(conformance.SUBJECTS)
    found = conformance.run(subjects, compile=compile)
    rows = track(found, "checking", len(subjects), console=Console(stderr=True), transient=True)
    table = _table("every adapter on every model and precision", *conformance.COLUMNS)
    failures: list[str] = []
    for row in rows:
        _row(table, *conformance.cells(row))
        failures += [f"{row.variant}: {fault}" for fault in row.faults]
    return table, failures


def tasks() -> Table:
    """Every task that has a name here."""
    from earnest.tasks import list_tasks

    table = _table("task: NAME", "task", "what it is", "from")
    for info in list_tasks():
        _row(table, info.name, info.description, info.source if info.available else f"{info.source} (not installed)")
    return table


def task(name: str) -> Group:
    """One task: its description, its settings, and three prompts with the grades of the right and an empty answer."""
    from earnest.tasks import get_task
    from earnest.tasks.external_reasoning_gym import ReasoningGym

    found = get_task(name)
    parts: list[Table] = []
    if isinstance(found, ReasoningGym):
        settings = _table(f"task: {{name: {name}, …}}", "setting", "default")
        for key, value in found.options().items():
            _row(settings, key, str(value))
        parts.append(settings)
    examples = _table("three held-out prompts", "prompt", "completion", "reward", "feedback", names=False)
    for prompt in found.prompts("heldout", 3, 0):
        answer = prompt.data.get("answer")
        for completion in ([] if answer is None else [str(answer)]) + [""]:
            grade = found.grade(prompt, completion)
            text = "\n".join(str(m.get("content")) for m in prompt.messages)
            _row(examples, text, completion or "(empty)", f"{grade.reward:g}", grade.feedback)
    return Group(Text(f"{found.name}: {found.description}"), *parts, examples)


def models() -> Table:
    """Every model that has a name here."""
    from earnest.models import list_models

    columns = ("model", "what it is", "parameters", "licence", "offline", "where")
    table = _table("model: NAME, a Hugging Face id, or a folder", *columns)
    for info in list_models():
        offline = "yes" if info.offline else "no"
        _row(table, info.name, info.what, f"{info.parameters:,}", info.licence, offline, info.where)
    return table

"""`earnest recipes`, `objectives`, `adapters`, `tasks`, `models`: what there is."""

from __future__ import annotations

from typing import Annotated

import typer

from earnest.commands.common import show


def recipes() -> None:
    """List the recipes and experiments."""
    from earnest import listings

    show(listings.recipes())


Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="Your own file or module that registers terms, adapters or tasks; repeatable."),
]


def _import(entries: list[str] | None) -> None:
    from earnest import plugins

    for entry in entries or ():
        plugins.load(entry)


def objectives(
    kind: Annotated[str | None, typer.Argument(help="Show the fields of this one.")] = None, imports: Imports = None
) -> None:
    """The terms of a loss, each with its paper."""
    from earnest import listings

    _import(imports)
    show(listings.objectives() if kind is None else listings.objective(kind))


def adapters(
    kind: Annotated[str | None, typer.Argument(help="Show the fields of this one.")] = None,
    imports: Imports = None,
    check: Annotated[bool, typer.Option("--check", help="Run the conformance checks; exit 1 on a failure.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="The checks, also under torch.compile.")] = False,
) -> None:
    """The adapters, each with its paper and its learning rate."""
    from earnest import listings

    _import(imports)
    if not (check or compile):
        show(listings.adapters() if kind is None else listings.adapter(kind))
        return
    table, failures = listings.checked_adapters(compile)
    show(table)
    print(*(f"✗ {failure}" for failure in failures), sep="\n", end="\n" if failures else "")
    raise typer.Exit(1 if failures else 0)


def tasks(
    name: Annotated[str | None, typer.Argument(help="Show this one: settings and examples.")] = None,
    imports: Imports = None,
) -> None:
    """List the tasks; with NAME show its description, its settings and three prompts with grades."""
    from earnest import listings

    _import(imports)
    show(listings.tasks() if name is None else listings.task(name))


def models() -> None:
    """List the models that have a name."""
    from earnest import listings

    show(listings.models())

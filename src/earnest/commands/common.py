"""What several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="e.g. seed=3 steps=20 optimizer.lr=1e-4 objective.0.clip=0.3 out=DIR"
    ),
]


def show(what: RenderableType) -> None:
    from rich.console import Console

    Console().print(what)

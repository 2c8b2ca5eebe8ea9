"""What several commands share."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from earnest.listings import Listing

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="e.g. seed=3 steps=20 optimizer.lr=1e-4 objective.0.clip=0.3 out=DIR"
    ),
]


def show(what: RenderableType) -> None:
    Console().print(what)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def show_listings(listings: Listing | list[Listing], as_json: bool) -> None:
    """A table for each listing; as JSON a list of records, or for several listings a list of such lists."""
    several = listings if isinstance(listings, list) else [listings]
    if as_json:
        records = [listing.records() for listing in several]
        print(json.dumps(records if len(records) > 1 else records[0], indent=1, ensure_ascii=False))
        return
    for listing in several:
        show(listing)

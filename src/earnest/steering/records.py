"""Reading what a loop has written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earnest.errors import CheckpointError


def finished_rounds(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, record) of the rounds that are whole, from 1 on; what lies behind a gap is not read."""
    number = 1
    while (path := folder / f"round-{number}" / "record.json").exists():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is no JSON ({error}); remove {path.parent} to do that round again."
            ) from None
        yield number, record
        number += 1

"""Read the records of a loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from earnest.errors import CheckpointError


def finished_rounds(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, record) of the complete rounds from 1 on; rounds after a gap are not read."""
    number = 1
    while (path := folder / f"round-{number}" / "record.json").exists():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON ({error}); remove {path.parent} to repeat that round.") from None
        yield number, record
        number += 1

"""The database of `earnest serve` as traces: every chat completion with its messages and its user's feedback.

The database is opened read-only, so the server may go on meanwhile. A completion's id and version are its provenance;
the user's text is its feedback, thumbs its reward, and an answer that the user typed instead is ``meta["better"]``.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earnest.replay.errors import TraceError

FILE = "earnest.sqlite3"
THUMBS = {"up": 1.0, "down": 0.0}


def database(place: Path) -> Path | None:
    """The server's database where ``place`` is its --data folder or the file itself; None: it is something else."""
    if place.is_dir() and (place / FILE).is_file():
        return place / FILE
    return place if place.suffix in (".sqlite3", ".sqlite", ".db") else None


def lines(path: Path) -> list[dict[str, Any]]:
    """A line of a trace file for each chat completion, in the order they were given."""
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30.0)
        connection.row_factory = sqlite3.Row
        try:
            given = connection.execute("SELECT * FROM completions WHERE kind = 'chat' ORDER BY created, id, choice")
            completions = given.fetchall()
            said = connection.execute("SELECT * FROM feedback ORDER BY seq").fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise TraceError(f"{path} is not a database of `earnest serve`: {error}.") from None
    if not completions:
        raise TraceError(f"{path} holds no chat completion yet; there is nothing to replay.")
    about: dict[tuple[str, int], list[sqlite3.Row]] = {}
    for row in said:
        about.setdefault((row["completion"], row["choice"]), []).append(row)
    return [_line(row, about.get((row["id"], row["choice"]), [])) for row in completions]


def _line(row: sqlite3.Row, said: Sequence[sqlite3.Row]) -> dict[str, Any]:
    words = [str(s["text"]) for s in said if s["text"]]
    thumbs = [THUMBS[s["thumbs"]] for s in said if s["thumbs"] in THUMBS]
    better = [str(s["better"]) for s in said if s["better"]]
    answer = {"role": "assistant", "content": row["text"]}
    return {
        "id": f"{row['id']}/{row['choice']}",
        "completion_id": row["id"],
        "model": row["model"],
        "version": row["version"],
        "messages": [*json.loads(row["messages"]), answer],
        "feedback": "\n".join(words) or None,
        "reward": thumbs[-1] if thumbs else None,
        "meta": {"better": better[-1]} if better else {},
    }

"""Updates that were running when the server died.

A row is written before an update begins and cleared when it ends, whatever its result. A row that a new process finds
means that the server died during the update. After two such deaths in a row the adapter's learning is set aside: its
feedback stays queued, other adapters go on learning, and a user has to resume it. So no stored feedback can make the
server die at every start.
"""

from __future__ import annotations

import sqlite3

from earnest.serve.database import Database

DEATHS = 2  # after which learning is set aside
SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts(
  adapter INTEGER PRIMARY KEY REFERENCES adapters(id) ON DELETE CASCADE,
  running INTEGER NOT NULL, deaths INTEGER NOT NULL DEFAULT 0);
"""
REASON = (
    f"the server died {DEATHS} times in a row while this adapter was learning; its feedback waits. "
    "POST /v1/adapters/NAME/resume tries again, POST /v1/adapters/NAME/cancel withdraws the feedback."
)


class Attempts:
    """The running updates of one database; create it once per process, before any update."""

    def __init__(self, db: Database) -> None:
        self.db = db
        db.run("UPDATE attempts SET deaths = deaths + 1, running = 0 WHERE running = 1")

    def begin(self, adapter: int) -> None:
        """An update of this adapter starts now. Does nothing where the adapter is deleted."""
        self.db.run(
            "INSERT INTO attempts(adapter, running) SELECT id, 1 FROM adapters WHERE id = ? "
            "ON CONFLICT(adapter) DO UPDATE SET running = 1",
            (adapter,),
        )

    def end(self, adapter: int, *, done: bool) -> None:
        """The update ended; ``done`` False where it is tried again later, which keeps the count of deaths."""
        if done:
            self.db.write(lambda c: clear(c, adapter))
        else:
            self.db.run("UPDATE attempts SET running = 0 WHERE adapter = ?", (adapter,))

    def set_aside(self) -> set[int]:
        """The adapters that do not learn until they are resumed."""
        return {row["adapter"] for row in self.db.read("SELECT adapter FROM attempts WHERE deaths >= ?", (DEATHS,))}


def clear(c: sqlite3.Connection, adapter: int) -> None:
    """Forget the deaths of an adapter, inside a transaction."""
    c.execute("DELETE FROM attempts WHERE adapter = ?", (adapter,))

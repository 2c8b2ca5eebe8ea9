"""The server's store: adapters, their versions, completions and feedback.

A feedback is *queued* until one transaction makes it part of exactly one version: so it is never lost and never
applied twice, even if the process dies. Feedback is ordered by its sequence number.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from earnest.errors import EarnestError
from earnest.serve import attempts
from earnest.serve.database import Database
from earnest.serve.errors import Busy, Conflict, NoAdapter, NoModel, NotFound, no_completion
from earnest.serve.names import check_name
from earnest.serve.rows import (
    STATUSES,
    AdapterRow,
    FeedbackRow,
    NewFeedback,
    Status,
    StoredCompletion,
    VersionRow,
    from_completion,
    to_adapter,
    to_completion,
    to_version,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS adapters(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, created REAL NOT NULL, learn TEXT NOT NULL,
  live INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 1,
  origin TEXT);
CREATE TABLE IF NOT EXISTS versions(
  adapter INTEGER NOT NULL REFERENCES adapters(id) ON DELETE CASCADE, number INTEGER NOT NULL, parent INTEGER NOT NULL,
  created REAL NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, record TEXT NOT NULL,
  PRIMARY KEY(adapter, number));
CREATE TABLE IF NOT EXISTS completions(
  id TEXT NOT NULL, choice INTEGER NOT NULL, created REAL NOT NULL, adapter INTEGER, model TEXT NOT NULL,
  version INTEGER NOT NULL, key TEXT NOT NULL, kind TEXT NOT NULL, messages TEXT NOT NULL, prompt BLOB NOT NULL,
  tokens BLOB NOT NULL, logprobs BLOB NOT NULL, temperature REAL NOT NULL, sampling TEXT NOT NULL, text TEXT NOT NULL,
  finish TEXT NOT NULL, PRIMARY KEY(id, choice));
CREATE TABLE IF NOT EXISTS feedback(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, received REAL NOT NULL,
  adapter INTEGER NOT NULL REFERENCES adapters(id) ON DELETE CASCADE, completion TEXT NOT NULL,
  choice INTEGER NOT NULL, key TEXT NOT NULL, text TEXT, thumbs TEXT, better TEXT, status TEXT NOT NULL,
  version INTEGER, note TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS tinker_runs(
  id TEXT PRIMARY KEY, base_model TEXT NOT NULL, lora TEXT NOT NULL, metadata TEXT NOT NULL,
  last_request TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tinker_checkpoints(
  run TEXT NOT NULL REFERENCES tinker_runs(id), kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL,
  time TEXT NOT NULL, size INTEGER NOT NULL, metadata TEXT NOT NULL, expires TEXT, PRIMARY KEY(run, kind, name));
CREATE INDEX IF NOT EXISTS feedback_queue ON feedback(adapter, status, seq);
CREATE INDEX IF NOT EXISTS completions_by_adapter ON completions(adapter, created);
"""
QUEUED = "SELECT completion FROM feedback WHERE status = 'queued'"
PUSHED = "pushed"  # the origin of an adapter that is trained elsewhere


class ServerStore:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.db = Database(folder / "earnest.sqlite3", SCHEMA + attempts.SCHEMA)

    def close(self) -> None:
        self.db.close()

    def version_folder(self, adapter: int, number: int) -> Path:
        """Where a version is kept. The path has numbers only: no name ever becomes a path."""
        return self.folder / "adapters" / str(adapter) / str(number)

    def bind(self, model: str, fingerprint: str) -> None:
        """Tokens and versions belong to one base model: a folder made with another is refused."""

        def work(c: sqlite3.Connection) -> str:
            c.execute("INSERT OR IGNORE INTO meta VALUES('base', ?)", (json.dumps([model, fingerprint]),))
            return str(c.execute("SELECT value FROM meta WHERE name = 'base'").fetchone()["value"])

        name, known = json.loads(self.db.write(work))
        if known != fingerprint:
            raise EarnestError(
                f"--data {self.folder}: its completions and versions belong to the model {name} ({known[:12]}), not to "
                f"{model} ({fingerprint[:12]}); serve that model, or take another folder."
            )

    def adapters(self) -> list[AdapterRow]:
        return [to_adapter(r) for r in self.db.read("SELECT * FROM adapters ORDER BY id")]

    def adapter(self, name: str) -> AdapterRow:
        row = self.db.one("SELECT * FROM adapters WHERE name = ?", (name,))
        if row is None:
            raise NoAdapter(name)
        return to_adapter(row)

    def adapter_by_id(self, number: int) -> AdapterRow | None:
        row = self.db.one("SELECT * FROM adapters WHERE id = ?", (number,))
        return None if row is None else to_adapter(row)

    def create(
        self, name: str, learn: Mapping[str, Any], *, exist_ok: bool = False, origin: str | None = None
    ) -> AdapterRow:
        check_name(name)

        def work(c: sqlite3.Connection) -> None:
            taken = c.execute("SELECT 1 FROM adapters WHERE name = ?", (name,)).fetchone()
            if taken and exist_ok:
                return
            if taken:
                raise _taken(name)
            c.execute(
                "INSERT INTO adapters(name, created, learn, origin) VALUES(?, ?, ?, ?)",
                (name, time.time(), json.dumps(learn), origin),
            )

        self.db.write(work)
        return self.adapter(name)

    def reserve(self) -> int:
        """The number of an adapter to come, for its folder: it is never given out again."""

        def work(c: sqlite3.Connection) -> int:
            number = c.execute("INSERT INTO adapters(name, created, learn) VALUES('', 0, '{}')").lastrowid
            c.execute("DELETE FROM adapters WHERE id = ?", (number,))
            assert number is not None
            return number

        return self.db.write(work)

    def add_whole(
        self,
        adapter: int,
        name: str,
        learn: Mapping[str, Any],
        origin: str,
        record: Mapping[str, Any],
        replaces: int | None = None,
    ) -> None:
        """One transaction: an adapter whose number was reserved exists, with version 1, whose folder is written, live;
        and ``replaces`` is gone. So the name never answers as the base, and never stops answering."""
        check_name(name)

        def work(c: sqlite3.Connection) -> None:
            taken = c.execute("SELECT id FROM adapters WHERE name = ?", (name,)).fetchone()
            if taken is not None and taken["id"] != replaces:
                raise _taken(name)
            c.execute("DELETE FROM adapters WHERE id = ?", (replaces,))
            now = time.time()
            c.execute(
                "INSERT INTO adapters(id, name, created, learn, live, next, origin) VALUES(?, ?, ?, ?, 1, 2, ?)",
                (adapter, name, now, json.dumps(learn), origin),
            )
            values = (adapter, 1, 0, now, "promoted", "", json.dumps(record))
            c.execute("INSERT INTO versions VALUES(?, ?, ?, ?, ?, ?, ?)", values)

        self.db.write(work)

    def orphans(self, numbers: Collection[int]) -> list[int]:
        """Those of these numbers that were given out here and belong to no adapter now."""
        last = self.db.one("SELECT seq FROM sqlite_sequence WHERE name = 'adapters'")
        known = {a.id for a in self.adapters()}
        return [n for n in numbers if last is not None and n <= last["seq"] and n not in known]

    def delete(self, adapter: int) -> None:
        """The adapter, its versions and its feedback; the completions stay."""
        self.db.run("DELETE FROM adapters WHERE id = ?", (adapter,))

    def versions(self, adapter: int) -> list[VersionRow]:
        rows = self.db.read("SELECT * FROM versions WHERE adapter = ? ORDER BY number", (adapter,))
        return [to_version(r) for r in rows]

    def version(self, adapter: AdapterRow, number: int) -> VersionRow:
        row = self.db.one("SELECT * FROM versions WHERE adapter = ? AND number = ?", (adapter.id, number))
        if row is None:
            raise _no_version(adapter.name, number, [v.number for v in self.versions(adapter.id)])
        return to_version(row)

    def add_version(
        self,
        adapter: int,
        number: int,
        parent: int,
        record: Mapping[str, Any],
        applied: Sequence[int],
        others: Mapping[int, tuple[Status, str]],
        refused: str,
    ) -> Literal["promoted", "candidate"] | None:
        """One transaction: the version exists, its feedback belongs to it, and it is live
        unless ``refused`` has a reason. None if the adapter or its feedback is gone; then nothing is written."""

        def work(c: sqlite3.Connection) -> Literal["promoted", "candidate"] | None:
            row = c.execute("SELECT * FROM adapters WHERE id = ?", (adapter,)).fetchone()
            if row is None or _withdrawn(c, [*applied, *others]):
                return None
            attempts.clear(c, adapter)
            why = refused
            if not why and row["pinned"]:
                why = f"the adapter is pinned at version {row['live']}"
            if not why and row["live"] != parent:
                why = f"version {row['live']} became live while this one was made from version {parent}"
            status: Literal["promoted", "candidate"] = "candidate" if why else "promoted"
            c.execute(
                "INSERT INTO versions VALUES(?, ?, ?, ?, ?, ?, ?)",
                (adapter, number, parent, time.time(), status, why, json.dumps(record)),
            )
            held = f"version {number} is a candidate that is not served ({why}); promoting it applies this feedback"
            became: tuple[Status, str] = ("held", held) if why else ("applied", "")
            _settle(c, dict.fromkeys(applied, became) | dict(others), number)
            live = row["live"] if why else number
            c.execute("UPDATE adapters SET live = ?, next = ? WHERE id = ?", (live, number + 1, adapter))
            return status

        return self.db.write(work)

    def settle(self, others: Mapping[int, tuple[Status, str]]) -> None:
        """Set the status of feedback that no version uses, with the reason; deleted or cancelled feedback is not
        changed."""
        self.db.write(lambda c: _settle(c, {s: o for s, o in others.items() if not _withdrawn(c, [s])}, None))

    def set_live(
        self, adapter: int, number: int | None, *, candidates: bool = True, pinned: bool | None = None
    ) -> None:
        """``number`` becomes live (None: the parent of the live one); a candidate is thereby promoted, and
        its feedback applied, unless ``candidates`` are refused. ``pinned`` is set along with it."""

        def work(c: sqlite3.Connection) -> None:
            row = _locked(c, adapter)
            name, live = row["name"], row["live"]
            if number is None and live == 0:
                raise Conflict(f"{name} is at version 0, the base; there is nothing before it.", "version")
            wanted = _known(c, row, live)["parent"] if number is None else number
            found = _known(c, row, wanted) if wanted > 0 else None
            if found is not None and found["status"] == "candidate" and not candidates:
                raise Conflict(
                    f"version {wanted} of {name} was never live ({found['reason']}); promote it instead.", "version"
                )
            c.execute("UPDATE versions SET status = 'promoted' WHERE adapter = ? AND number = ?", (adapter, wanted))
            c.execute(
                "UPDATE feedback SET status = 'applied', note = '' "
                "WHERE adapter = ? AND version = ? AND status = 'held'",
                (adapter, wanted),
            )
            stays = row["pinned"] if pinned is None else int(pinned)
            c.execute("UPDATE adapters SET live = ?, pinned = ? WHERE id = ?", (wanted, stays, adapter))

        self.db.write(work)

    def pin(self, adapter: int, number: int | None) -> None:
        """Keep ``number`` live whatever is learned; None: end that."""
        if number is None:
            self.db.run("UPDATE adapters SET pinned = 0 WHERE id = ?", (adapter,))
        else:
            self.set_live(adapter, number, pinned=True)

    def delete_version(self, adapter: int, number: int) -> None:
        """Delete a version, unless it is live or another was made from it; check and deletion are one transaction."""

        def work(c: sqlite3.Connection) -> None:
            row = _locked(c, adapter)
            _known(c, row, number)
            if number == row["live"]:
                raise Conflict(f"version {number} of {row['name']} is live; roll back first.", "number")
            if c.execute("SELECT 1 FROM versions WHERE adapter = ? AND parent = ?", (adapter, number)).fetchone():
                raise Conflict(
                    f"another version of {row['name']} was made from version {number}; delete that first.", "number"
                )
            c.execute("DELETE FROM versions WHERE adapter = ? AND number = ?", (adapter, number))
            c.execute(
                "UPDATE feedback SET note = ? WHERE adapter = ? AND version = ? AND status = 'held'",
                (f"version {number} was a candidate and is deleted", adapter, number),
            )

        self.db.write(work)

    def add_completions(self, completions: Sequence[StoredCompletion]) -> Future[None]:
        rows = [from_completion(c) for c in completions]
        names = [f.name for f in fields(StoredCompletion)]
        places = ", ".join(f":{name}" for name in names)

        def work(c: sqlite3.Connection) -> None:
            c.executemany(f"INSERT INTO completions({', '.join(names)}) VALUES({places})", rows)

        return self.db.submit(work)

    def completion(self, name: str, choice: int = 0) -> StoredCompletion:
        row = self.db.one("SELECT * FROM completions WHERE id = ? AND choice = ?", (name, choice))
        if row is None:
            raise no_completion(name, choice)
        return to_completion(row)

    def purge(self, before: float, adapter: int | None = None, completion: str | None = None) -> int:
        """Delete conversations from before a time (of one adapter, or one by its id), and the text of the feedback on
        them; those whose feedback is queued stay. Returns how many answers were deleted."""

        def work(c: sqlite3.Connection) -> int:
            which = "created < ? AND (? IS NULL OR adapter = ?) AND (? IS NULL OR id = ?)"
            gone = f"SELECT id FROM completions WHERE {which} AND id NOT IN ({QUEUED})"
            values = (before, adapter, adapter, completion, completion)
            c.execute(f"UPDATE feedback SET text = NULL, better = NULL WHERE completion IN ({gone})", values)
            return c.execute(f"DELETE FROM completions WHERE {which} AND id NOT IN ({QUEUED})", values).rowcount

        return self.db.write(work)

    def add_feedback(
        self, said: Sequence[tuple[NewFeedback, AdapterRow]], key: str, limit: int
    ) -> list[tuple[FeedbackRow, bool]]:
        """Accept all of them or none; when this returns they are on the disk. (row, whether it was known already)."""

        def work(c: sqlite3.Connection) -> list[tuple[str, bool]]:
            names: list[tuple[str, bool]] = []
            for one, adapter in said:
                name = one.id or f"fb-{uuid.uuid4().hex}"
                values = (adapter.id, one.completion, one.choice, one.text, one.thumbs, one.better)
                old = c.execute("SELECT * FROM feedback WHERE id = ?", (name,)).fetchone()
                if old is not None:
                    same = tuple(old[k] for k in ("adapter", "completion", "choice", "text", "thumbs", "better"))
                    if same != values:
                        raise Conflict(f"the feedback {name!r} was accepted already, with another content.", "id")
                    names.append((name, True))
                    continue
                c.execute(
                    "INSERT INTO feedback(id, received, adapter, completion, choice, text, thumbs, better, key, status)"
                    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued')",
                    (name, time.time(), *values, key),
                )
                names.append((name, False))
            for adapter in {a.id: a for _, a in said}.values():
                waiting = c.execute(
                    "SELECT COUNT(*) FROM feedback WHERE adapter = ? AND status = 'queued'", (adapter.id,)
                ).fetchone()[0]
                if waiting > limit and not all(known for _, known in names):
                    raise Busy(f"{adapter.name} has {limit} feedbacks waiting to be learned from; try again later.")
            return names

        return [(self.feedback(name), known) for name, known in self.db.write(work)]

    def feedback(self, name: str) -> FeedbackRow:
        row = self.db.one("SELECT * FROM feedback WHERE id = ?", (name,))
        if row is None:
            raise NotFound(f"there is no feedback {name[:80]!r}.", "id")
        return FeedbackRow(**dict(row))

    def recent_feedback(self, adapter: int, limit: int, key: str | None = None) -> list[FeedbackRow]:
        """The newest feedback first; only of one ``key``, if given."""
        rows = self.db.read(
            "SELECT * FROM feedback WHERE adapter = ? AND (? IS NULL OR key = ?) ORDER BY seq DESC LIMIT ?",
            (adapter, key, key, limit),
        )
        return [FeedbackRow(**dict(r)) for r in rows]

    def queued(self, adapter: int, limit: int) -> list[FeedbackRow]:
        """The oldest queued feedback, in order."""
        rows = self.db.read(
            "SELECT * FROM feedback WHERE adapter = ? AND status = 'queued' ORDER BY seq LIMIT ?", (adapter, limit)
        )
        return [FeedbackRow(**dict(r)) for r in rows]

    def waiting_to_learn(self) -> list[AdapterRow]:
        """The adapters that have queued feedback, the one whose feedback has waited longest first."""
        rows = self.db.read(
            "SELECT adapters.* FROM adapters JOIN (SELECT adapter, MIN(seq) AS first FROM feedback "
            "WHERE status = 'queued' GROUP BY adapter) ON adapters.id = adapter ORDER BY first"
        )
        return [to_adapter(r) for r in rows]

    def cancel(self, adapter: int, feedback: str | None = None) -> list[str]:
        """Withdraw the queued feedback of an adapter (only the one with the id ``feedback``, if given). Returns the
        ids. An update that is under way with any of it makes no version."""

        def work(c: sqlite3.Connection) -> list[str]:
            rows = c.execute(
                "UPDATE feedback SET status = 'cancelled', note = 'cancelled before it was learned from' "
                "WHERE adapter = ? AND status = 'queued' AND (? IS NULL OR id = ?) RETURNING id, seq",
                (adapter, feedback, feedback),
            ).fetchall()
            attempts.clear(c, adapter)
            return [r["id"] for r in sorted(rows, key=lambda r: int(r["seq"]))]

        return self.db.write(work)

    def failed(self) -> int:
        """How many feedbacks of all adapters could not be learned from."""
        return int(self.db.read("SELECT COUNT(*) FROM feedback WHERE status = 'failed'")[0][0])

    def counts(self, adapter: int) -> dict[str, int]:
        rows = self.db.read("SELECT status, COUNT(*) AS n FROM feedback WHERE adapter = ? GROUP BY status", (adapter,))
        return dict.fromkeys(STATUSES, 0) | {r["status"]: r["n"] for r in rows}


def _taken(name: str) -> Conflict:
    return Conflict(f"there is an adapter {name!r} already; delete it first, or choose another name.", "name")


def _locked(c: sqlite3.Connection, adapter: int) -> sqlite3.Row:
    """The adapter inside a transaction."""
    row: sqlite3.Row | None = c.execute("SELECT * FROM adapters WHERE id = ?", (adapter,)).fetchone()
    if row is None:
        raise NoModel("this adapter is deleted; GET /v1/models lists what there is.", "model")
    return row


def _known(c: sqlite3.Connection, adapter: sqlite3.Row, number: int) -> sqlite3.Row:
    """Its version inside a transaction."""
    rows = c.execute("SELECT * FROM versions WHERE adapter = ? ORDER BY number", (adapter["id"],)).fetchall()
    found: dict[int, sqlite3.Row] = {r["number"]: r for r in rows}
    if number not in found:
        raise _no_version(adapter["name"], number, list(found))
    return found[number]


def _no_version(name: str, number: int, known: Sequence[int]) -> NotFound:
    return NotFound(f"{name} has no version {number}; it has {known or 'none but 0, the base'}.", "version")


def _withdrawn(c: sqlite3.Connection, seqs: Sequence[int]) -> bool:
    """Whether any of these was cancelled or deleted."""
    places = ", ".join("?" * len(seqs))
    kept = c.execute(f"SELECT COUNT(*) FROM feedback WHERE status <> 'cancelled' AND seq IN ({places})", seqs)
    return bool(kept.fetchone()[0] < len(seqs))


def _settle(c: sqlite3.Connection, found: Mapping[int, tuple[Status, str]], version: int | None) -> None:
    for seq, (status, note) in found.items():
        changed = c.execute(
            "UPDATE feedback SET status = ?, note = ?, version = ? WHERE seq = ? AND status = 'queued'",
            (status, note, version if status in ("applied", "held") else None, seq),
        ).rowcount
        assert changed == 1, f"feedback {seq} is not in the queue: it would be applied twice"

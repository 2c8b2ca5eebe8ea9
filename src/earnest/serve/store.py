"""What the server remembers: adapters, their versions, every completion it gave, every feedback it accepted.

A feedback is *queued* until one transaction makes it part of exactly one version: so it is never lost and never
applied twice, whenever the process dies. Its order is its sequence number.
"""

from __future__ import annotations

import array
import json
import re
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from earnest.errors import EarnestError
from earnest.serve.database import Database
from earnest.serve.errors import BadRequest, Busy, Conflict, NoModel, NotFound

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
CREATE INDEX IF NOT EXISTS feedback_queue ON feedback(adapter, status, seq);
CREATE INDEX IF NOT EXISTS completions_by_adapter ON completions(adapter, created);
"""

NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,32}){0,2}(/[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,32}){0,2})?"
)
RESERVED = frozenset({"base", "versions", "diff", "rollback", "promote", "pin", "fork", "export"})
PUSHED = "pushed"  # the origin of an adapter that is trained elsewhere
Thumbs = Literal["up", "down"]
Status = Literal["queued", "applied", "held", "unused", "failed"]
"""``applied``: in a version that was let live; ``held``: in a candidate, until somebody promotes it."""


def check_name(name: str) -> str:
    """An adapter's name: one or two words. It never becomes a path: folders are numbered."""
    if not NAME.fullmatch(name) or RESERVED & set(name.split("/")):
        raise BadRequest(
            f"{name[:80]!r} is no name for an adapter; give one or two words of letters, digits, '-' and '_' with a "
            f"'/' between them, such as team/assistant; taken words: {', '.join(sorted(RESERVED))}.",
            "name",
        )
    return name


@dataclass(frozen=True)
class AdapterRow:
    """An adapter: version 0 is the base; ``live`` answers, ``pinned`` keeps it from moving."""

    id: int
    name: str
    created: float
    learn: Mapping[str, Any]
    live: int
    pinned: bool
    next: int
    origin: str | None


@dataclass(frozen=True)
class Completion:
    """An answer that was given, exactly: its tokens and the log-probs that they were sampled with."""

    id: str
    choice: int
    model: str
    version: int
    kind: Literal["chat", "text"]
    messages: Sequence[Mapping[str, Any]]
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    text: str
    finish: str
    adapter: int | None = None
    key: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Said:
    """What a user said about a completion, on its way in."""

    completion: str
    choice: int = 0
    text: str | None = None
    thumbs: Thumbs | None = None
    better: str | None = None
    id: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class FeedbackRow:
    """An accepted feedback and what became of it."""

    seq: int
    id: str
    received: float
    adapter: int
    completion: str
    choice: int
    key: str
    text: str | None
    thumbs: Thumbs | None
    better: str | None
    status: Status
    version: int | None
    note: str

    def public(self, adapter: str) -> dict[str, Any]:
        shown = asdict(self)
        shown.pop("seq")
        return shown | {"adapter": adapter}


@dataclass(frozen=True)
class VersionRow:
    """A version: ``promoted`` ones have been live or may be; a ``candidate`` says in ``reason`` why it is not."""

    adapter: int
    number: int
    parent: int
    created: float
    status: Literal["promoted", "candidate"]
    reason: str
    record: Mapping[str, Any]


class Store:
    """The tables, and the few questions that are asked of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.db = Database(folder / "earnest.sqlite3", SCHEMA)

    def close(self) -> None:
        self.db.close()

    # --- the base -----------------------------------------------------------------------------------------------------

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

    # --- adapters -----------------------------------------------------------------------------------------------------

    def adapters(self) -> list[AdapterRow]:
        return [_adapter(r) for r in self.db.read("SELECT * FROM adapters ORDER BY id")]

    def adapter(self, name: str) -> AdapterRow:
        row = self.db.one("SELECT * FROM adapters WHERE name = ?", (name,))
        if row is None:
            raise NoModel(f"there is no adapter {name[:160]!r}; GET /v1/models lists what there is.", "model")
        return _adapter(row)

    def adapter_by_id(self, number: int) -> AdapterRow | None:
        row = self.db.one("SELECT * FROM adapters WHERE id = ?", (number,))
        return None if row is None else _adapter(row)

    def create(
        self, name: str, learn: Mapping[str, Any], *, exist_ok: bool = False, origin: str | None = None
    ) -> AdapterRow:
        check_name(name)

        def work(c: sqlite3.Connection) -> None:
            taken = c.execute("SELECT 1 FROM adapters WHERE name = ?", (name,)).fetchone()
            if taken and exist_ok:
                return
            if taken:
                raise Conflict(
                    f"there is an adapter {name!r} already; delete it first, or choose another name.", "name"
                )
            c.execute(
                "INSERT INTO adapters(name, created, learn, origin) VALUES(?, ?, ?, ?)",
                (name, time.time(), json.dumps(learn), origin),
            )

        self.db.write(work)
        return self.adapter(name)

    def delete(self, adapter: int) -> None:
        """The adapter, its versions and its feedback; the completions stay, as the record of what was said."""
        self.db.write(lambda c: c.execute("DELETE FROM adapters WHERE id = ?", (adapter,)).rowcount)

    # --- versions -----------------------------------------------------------------------------------------------------

    def versions(self, adapter: int) -> list[VersionRow]:
        rows = self.db.read("SELECT * FROM versions WHERE adapter = ? ORDER BY number", (adapter,))
        return [_version(r) for r in rows]

    def version(self, adapter: AdapterRow, number: int) -> VersionRow:
        row = self.db.one("SELECT * FROM versions WHERE adapter = ? AND number = ?", (adapter.id, number))
        if row is None:
            known = [v.number for v in self.versions(adapter.id)]
            raise NotFound(
                f"{adapter.name} has no version {number}; it has {known or 'none but 0, the base'}.", "version"
            )
        return _version(row)

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
        """One transaction: the version exists, its feedback belongs to it, and unless ``refused`` says why not it is
        live. None where the adapter is gone: nothing is written then."""

        def work(c: sqlite3.Connection) -> Literal["promoted", "candidate"] | None:
            row = c.execute("SELECT * FROM adapters WHERE id = ?", (adapter,)).fetchone()
            if row is None:
                return None
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
            became: tuple[Status, str] = ("held", _held(number, why)) if why else ("applied", "")
            _settle(c, dict.fromkeys(applied, became) | dict(others), number)
            live = row["live"] if why else number
            c.execute("UPDATE adapters SET live = ?, next = ? WHERE id = ?", (live, number + 1, adapter))
            return status

        return self.db.write(work)

    def settle(self, others: Mapping[int, tuple[Status, str]]) -> None:
        """Feedback that no version comes of: each with the reason."""
        self.db.write(lambda c: _settle(c, others, None))

    def set_live(self, adapter: int, number: int) -> None:
        """``number`` answers from now on; a candidate is thereby promoted, and its feedback applied."""

        def work(c: sqlite3.Connection) -> None:
            c.execute("UPDATE versions SET status = 'promoted' WHERE adapter = ? AND number = ?", (adapter, number))
            c.execute(
                "UPDATE feedback SET status = 'applied', note = '' "
                "WHERE adapter = ? AND version = ? AND status = 'held'",
                (adapter, number),
            )
            c.execute("UPDATE adapters SET live = ? WHERE id = ?", (number, adapter))

        self.db.write(work)

    def pin(self, adapter: int, number: int | None) -> None:
        """Stay at ``number`` whatever is learned; None: move again."""
        if number is None:
            self.db.write(lambda c: c.execute("UPDATE adapters SET pinned = 0 WHERE id = ?", (adapter,)).rowcount)
            return
        self.set_live(adapter, number)
        self.db.write(lambda c: c.execute("UPDATE adapters SET pinned = 1 WHERE id = ?", (adapter,)).rowcount)

    def delete_version(self, adapter: int, number: int) -> None:
        def work(c: sqlite3.Connection) -> None:
            c.execute("DELETE FROM versions WHERE adapter = ? AND number = ?", (adapter, number))
            c.execute(
                "UPDATE feedback SET note = ? WHERE adapter = ? AND version = ? AND status = 'held'",
                (f"version {number} was a candidate and is deleted", adapter, number),
            )

        self.db.write(work)

    # --- completions --------------------------------------------------------------------------------------------------

    def add_completions(self, completions: Sequence[Completion]) -> Future[None]:
        rows = [
            (
                c.id,
                c.choice,
                c.created,
                c.adapter,
                c.model,
                c.version,
                c.key,
                c.kind,
                json.dumps([dict(m) for m in c.messages]),
                array.array("i", c.prompt).tobytes(),
                array.array("i", c.tokens).tobytes(),
                array.array("d", c.logprobs).tobytes(),
                c.temperature,
                json.dumps(c.sampling),
                c.text,
                c.finish,
            )
            for c in completions
        ]

        def work(c: sqlite3.Connection) -> None:
            c.executemany(f"INSERT INTO completions VALUES({', '.join('?' * 16)})", rows)

        return self.db.submit(work)

    def completion(self, name: str, choice: int = 0) -> Completion:
        row = self.db.one("SELECT * FROM completions WHERE id = ? AND choice = ?", (name, choice))
        if row is None:
            raise NotFound(f"this server gave no completion {name[:80]!r} with a choice {choice}.", "completion_id")
        return _completion(row)

    # --- feedback -----------------------------------------------------------------------------------------------------

    def add_feedback(
        self, said: Sequence[tuple[Said, AdapterRow]], key: str, limit: int
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

        done = self.db.write(work)
        return [(self.feedback(name), known) for name, known in done]

    def feedback(self, name: str) -> FeedbackRow:
        row = self.db.one("SELECT * FROM feedback WHERE id = ?", (name,))
        if row is None:
            raise NotFound(f"there is no feedback {name[:80]!r}.", "id")
        return _feedback(row)

    def recent_feedback(self, adapter: int, limit: int) -> list[FeedbackRow]:
        rows = self.db.read("SELECT * FROM feedback WHERE adapter = ? ORDER BY seq DESC LIMIT ?", (adapter, limit))
        return [_feedback(r) for r in rows]

    def queued(self, adapter: int, limit: int) -> list[FeedbackRow]:
        """The oldest that wait, in order."""
        rows = self.db.read(
            "SELECT * FROM feedback WHERE adapter = ? AND status = 'queued' ORDER BY seq LIMIT ?", (adapter, limit)
        )
        return [_feedback(r) for r in rows]

    def next_to_learn(self) -> AdapterRow | None:
        """The adapter whose feedback has waited longest."""
        row = self.db.one(
            "SELECT adapters.* FROM feedback JOIN adapters ON adapters.id = feedback.adapter "
            "WHERE status = 'queued' ORDER BY seq LIMIT 1"
        )
        return None if row is None else _adapter(row)

    def counts(self, adapter: int) -> dict[str, int]:
        """How many feedbacks are in each state."""
        rows = self.db.read("SELECT status, COUNT(*) AS n FROM feedback WHERE adapter = ? GROUP BY status", (adapter,))
        return {"queued": 0, "applied": 0, "held": 0, "unused": 0, "failed": 0} | {r["status"]: r["n"] for r in rows}


def _held(number: int, why: str) -> str:
    return f"version {number} is a candidate and answers nobody ({why}); promoting it applies this feedback"


def _settle(c: sqlite3.Connection, found: Mapping[int, tuple[Status, str]], version: int | None) -> None:
    for seq, (status, note) in found.items():
        changed = c.execute(
            "UPDATE feedback SET status = ?, note = ?, version = ? WHERE seq = ? AND status = 'queued'",
            (status, note, version if status in ("applied", "held") else None, seq),
        ).rowcount
        assert changed == 1, f"feedback {seq} is not in the queue: it would be applied twice"


def _adapter(row: sqlite3.Row) -> AdapterRow:
    values = dict(row)
    return AdapterRow(**values | {"learn": json.loads(values["learn"]), "pinned": bool(values["pinned"])})


def _version(row: sqlite3.Row) -> VersionRow:
    return VersionRow(**dict(row) | {"record": json.loads(row["record"])})


def _feedback(row: sqlite3.Row) -> FeedbackRow:
    return FeedbackRow(**dict(row))


def _completion(row: sqlite3.Row) -> Completion:
    values = dict(row)
    for name, code in (("prompt", "i"), ("tokens", "i"), ("logprobs", "d")):
        numbers = array.array(code)
        numbers.frombytes(values[name])
        values[name] = tuple(numbers)
    for name in ("messages", "sampling"):
        values[name] = json.loads(values[name])
    return Completion(**values)

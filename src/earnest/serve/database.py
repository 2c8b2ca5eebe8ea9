"""The server's SQLite database: one writer thread, group commit, every write on the disk before it is reported.

WAL with ``synchronous=FULL``: a commit returns after its fsync. Writes that arrive during a sync share the next
commit, each inside a savepoint of its own, so a write that fails rolls back only itself. Where SQLite rolls back the
whole commit (a full disk), each of its writes is tried again in a commit of its own.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]
Outcome = tuple[Future[Any], Any, BaseException | None]
MOST = 256  # writes in one commit


class Database:
    """A database file with its tables."""

    def __init__(self, path: Path, schema: str) -> None:
        self.path = path
        self._of_thread = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._readers_lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self.failure: str | None = None
        """Why the latest commit failed; None where it succeeded."""
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's other files take the mode of this one
        path.chmod(0o600)
        self._writer = self._open()
        self._writer.executescript(schema)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="earnest-write", daemon=True)
        self._thread.start()

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30.0)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Do ``work`` in a transaction; the future is done when the result is on the disk."""
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(RuntimeError("the database is closed"))
        else:
            self._queue.put((work, future))
        return future

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """``submit``, and wait for the result."""
        return self.submit(work).result()

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """``write`` of one statement; returns how many rows it changed."""
        return self.write(lambda c: c.execute(sql, values).rowcount)

    def _run(self) -> None:
        more = self._queue.get()
        while more is not None:  # ``close`` puts None
            batch = [more]
            while len(batch) < MOST and not self._queue.empty() and (more := self._queue.get()) is not None:
                batch.append(more)
            self._commit(batch)
            if more is not None:
                more = self._queue.get()

    def _commit(self, batch: Sequence[tuple[Work, Future[Any]]]) -> None:
        # from here on cancellation has no effect: the write is committed, and a cancelled future gets no result
        for _, future in batch:
            future.set_running_or_notify_cancel()
        outcomes = self._attempt(batch)
        if outcomes is None:
            outcomes = [outcome for one in batch for outcome in self._attempt([one]) or ()]
        for future, result, failure in outcomes:
            if future.cancelled():
                continue
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def _attempt(self, batch: Sequence[tuple[Work, Future[Any]]]) -> list[Outcome] | None:
        """One commit. None: nothing of several writes was committed, because of one of them or of the disk."""
        outcomes: list[Outcome] = []
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for work, future in batch:
                self._writer.execute("SAVEPOINT one")
                try:
                    result = work(self._writer)
                except Exception as error:
                    # SQLite has rolled back the whole transaction: the disk is full
                    if not self._writer.in_transaction:
                        raise
                    self._writer.execute("ROLLBACK TO one")
                    outcomes.append((future, None, error))
                else:
                    outcomes.append((future, result, None))
                self._writer.execute("RELEASE one")
            self._writer.execute("COMMIT")
            self.failure = None
        except BaseException as error:  # a full disk: no write of this batch is reported as safe
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            self.failure = str(error)
            return [(batch[0][1], None, error)] if len(batch) == 1 else None
        return outcomes

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Rows as of the last commit."""
        connection = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = self._open()
            with self._readers_lock:
                self._readers.append(connection)
        return list(connection.execute(sql, values))

    def one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        rows = self.read(sql, values)
        return rows[0] if rows else None

    def close(self) -> None:
        """Finish the writes that were submitted, and close the file."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        with self._readers_lock:
            for connection in self._readers:
                connection.close()
            self._readers.clear()
        self._writer.close()

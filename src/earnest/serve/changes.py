"""Events for changes that no code announces: run folders that other processes write, and the load of the chat.

While a client reads ``/v1/events``, both are compared with their last state once per second. A change becomes an event
without content: `runs` for clients that may read runs, `health` for all. The endpoint of that name has the details.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earnest.serve.state import State

EVERY = 1.0
PURGE_EVERY = 600.0
log = logging.getLogger("earnest.serve")


class ChangeWatcher:
    """One thread that compares the present state with the last one."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._ended = threading.Event()
        self._seen: dict[str, Any] = {}
        self._purge_at = 0.0
        self._thread = threading.Thread(target=self._run, name="earnest-changes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def purge(self) -> None:
        """Delete the conversations that are older than the server keeps them."""
        self._purge_at = time.monotonic() + PURGE_EVERY
        days = self.state.settings.keep_days
        if days is None:
            return
        try:
            self.state.store.purge(time.time() - days * 86400.0)
        except Exception:  # a full disk, for example; tried again later
            log.exception("old conversations could not be deleted")

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            if time.monotonic() >= self._purge_at:
                self.purge()
            if self.state.bus.watched:
                self.check()

    def check(self) -> None:
        """Publish what changed since the last check. The first one publishes nothing: a new reader fetches the state
        itself."""
        for kind, now in (("runs", self._runs()), ("health", self._health())):
            if self._seen.setdefault(kind, now) != now:
                self._seen[kind] = now
                self.state.bus.hint(kind, "runs" if kind == "runs" else None)

    def _runs(self) -> list[Any]:
        from earnest.serve.dashboard import runs

        found = []
        for folder in runs.folders(self.state.settings):
            files = [folder / name for name in ("run.json", "metrics.jsonl", "verdict.json")]
            try:
                found.append((folder.name, *((f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.exists())))
            except OSError:  # it is being deleted
                continue
        return found

    def _health(self) -> list[Any]:
        host = self.state.host
        if not host.ready():
            return [host.failure]
        learning = None if self.state.learner is None else self.state.learner.doing
        return [host.decoder.load(), host.attached(), learning and (learning["adapter"], learning["phase"])]

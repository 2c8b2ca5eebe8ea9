"""The parts of a running server, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from earnest import disk
from earnest.errors import ConfigError
from earnest.serve import versions
from earnest.serve.attempts import Attempts
from earnest.serve.changes import ChangeWatcher
from earnest.serve.events import Bus
from earnest.serve.host import Host
from earnest.serve.keys import Keys
from earnest.serve.leases import Leases
from earnest.serve.settings import ServeSettings
from earnest.serve.store import ServerStore
from earnest.serve.text import Text

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from earnest.serve.learner import Learner


class State:
    """Store, host, leases, keys, events and the learner. Creating it does not import torch; ``start`` begins to load
    the model."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.keys = Keys(settings.keys)
        if not self.keys.on and not settings.loopback:
            raise ConfigError(
                f"--host {settings.host} can be reached from other machines, so it needs --keys FILE; "
                "`earnest serve --new-key NAME` makes a key. Without keys, listen on 127.0.0.1."
            )
        try:
            settings.data.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = _lock(settings)
            self.store = ServerStore(settings.data)
            (settings.data / "adapters").mkdir(0o700, exist_ok=True)
            (settings.data / "adapters").chmod(0o700)
        except sqlite3.Error as error:
            raise ConfigError(
                f"--data {settings.data}: its database cannot be opened ({error}); restore earnest.sqlite3 from a "
                "copy, or take another folder."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--data {settings.data}: the server cannot write there ({error.strerror}); give a folder that this "
                "user can write to."
            ) from None
        self.attempts = Attempts(self.store.db)
        self.streams: Counter[str] = Counter()
        """Streams of events that are open, by the name of their key."""
        versions.sweep(self.store)
        self.host = Host(settings)
        self.bus = Bus()
        self.leases = Leases(self.host, self.store)
        self.changes = ChangeWatcher(self)
        self.learner: Learner | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        for name in settings.adapters:
            self.store.create(name, {}, exist_ok=True)
        self.host.after_load.append(self._loaded)

    def _loaded(self) -> None:
        """In the loading thread: what needs torch and the policy."""
        from earnest.serve.learner import Learner

        policy = self.host.policy
        self.store.bind(policy.name, policy.fingerprint())
        self.learner = Learner(self)
        self.learner.start()

    @property
    def text(self) -> Text:
        return self.host.text

    def wait(self) -> None:
        """Wait until the model is loaded; 503 if that takes too long."""
        self.host.wait(self.settings.load_wait)

    def tinker_caller(self, request: Request) -> None:
        """The Tinker API needs the right to teach an adapter named `tinker`, except for its health. Deleting a
        checkpoint, or setting when it expires, also needs the right to delete."""
        if self.keys.on and not request.url.path.endswith("/healthz"):
            caller = self.keys.caller(request)
            caller.demand("tinker", "teach")
            if request.method == "DELETE" or (request.method == "PUT" and request.url.path.endswith("/ttl")):
                caller.demand("tinker", "delete")

    def storage(self) -> str | None:
        """Why nothing can be stored; None if it can. After a failure, one small write tests the disk again."""
        if self.store.db.failure is not None:
            with contextlib.suppress(Exception):
                self.store.db.run("INSERT OR REPLACE INTO meta VALUES('probe', '')")
        return self.store.db.failure

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the event loop, and keep a reference until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait for the work given to ``later``."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self) -> None:
        self.host.start()
        self.changes.start()

    def close(self) -> None:
        """Stop all parts. Everything accepted is on the disk already; background work is abandoned."""
        self.bus.close()
        self.changes.close()
        self.host.stopping = True
        if self.learner is not None:
            self.learner.close()
        self.host.close()
        if self.learner is not None:  # it may have been started while the host was loading
            self.learner.close()
        self.store.close()
        self._lock.release()


def _lock(settings: ServeSettings) -> BaseFileLock:
    """Lock the data folder: two servers in one folder would both apply its feedback."""
    found = disk.lock(settings.data / "lock")
    if found is None:
        raise ConfigError(f"--data {settings.data} is in use by another server; stop it, or take another folder.")
    return found

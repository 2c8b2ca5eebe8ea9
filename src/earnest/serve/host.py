"""The host: one policy, the adapters on it, and the turns that all torch work takes.

Outside a turn every adapter's scale is 0, so the model is the base. Inside a turn the named adapters are active: one
(``turn(kind, adapter)``, ``only``), or one per row (``rows``). While a turn is yielded (``Turn.yield_turn``), all
scales are 0 for the others, and they are restored afterwards.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from earnest.errors import EarnestError
from earnest.serve.adapter_cache import AdapterCache
from earnest.serve.errors import Loading, reason
from earnest.serve.settings import ServeSettings
from earnest.serve.text import Text
from earnest.serve.turns import ORDER, Kind, Ticket, Turns

if TYPE_CHECKING:
    from pathlib import Path

    from earnest.adapters import Adapter, Variant
    from earnest.models import Policy
    from earnest.serve.decode import Decoder
    from earnest.serve.grammar import Grammars

log = logging.getLogger("earnest.serve")


class Stopping(Exception):
    """The server shuts down: the holder of a turn ends its work without a result."""


class Cancelled(Exception):
    """The work of this turn was cancelled; it ends without a result."""


class Turn:
    """A held turn. Call ``yield_turn`` between micro-batches, decoding steps and the like."""

    def __init__(self, host: Host, ticket: Ticket) -> None:
        self._host, self._ticket = host, ticket
        self.to: Collection[Kind] = ORDER
        """Kinds that may be served while this turn is yielded."""
        self.cancelled: Callable[[], bool] = lambda: False
        """Whether the work of this turn must end at its next yield."""

    def yield_turn(self) -> None:
        """Let waiting threads with a higher priority go first. Raises ``Stopping`` for background work when the server
        shuts down, and ``Cancelled`` where the work was cancelled."""
        if self._ticket.kind == "learn" and self._host.stopping:
            raise Stopping
        if self.cancelled():
            raise Cancelled
        held: dict[str, float] = {}

        def close() -> None:
            held.update(self._host._scales())
            self._host._set({})

        self._host.turns.yield_turn(self._ticket, self.to, close, lambda: self._host._set(held))

    @contextmanager
    def serving(self, *kinds: Kind) -> Iterator[None]:
        """Inside the block only these kinds are served while this turn is yielded."""
        before, self.to = self.to, kinds
        try:
            yield
        finally:
            self.to = before


class Host:
    """One policy and its adapters. It is loaded in a thread of its own; callers wait for ``ready``."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.turns = Turns()
        self.failure: str | None = None
        self.stopping = False
        self.after_load: list[Callable[[], None]] = []
        """Called in the loading thread when the policy is loaded, before ``ready``."""
        self._parts: tuple[Policy, Text, Decoder] | None = None
        self._adapters: dict[str, Adapter] = {}
        self.cache = AdapterCache(self, settings.max_resident)
        self._ready = threading.Event()
        self._of_thread = threading.local()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread = threading.Thread(target=self._load, name="earnest-load", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        try:
            if self.settings.threads is not None:  # a thread that starts later takes its number from here
                os.environ["OMP_NUM_THREADS"] = str(self.settings.threads)
            from earnest.models import load

            if self.settings.threads is not None:
                import torch

                torch.set_num_threads(self.settings.threads)
            policy = load(self.settings.model, device=self.settings.device, dtype=self.settings.dtype)
            _ = policy.cache_kind, policy.decoder, policy.fingerprint()
            from earnest.serve.decode import Decoder

            decoder = Decoder(self, self.settings.max_rows, self.settings.max_waiting)
            self._parts = policy, Text(policy), decoder
            for call in self.after_load:
                call()
            decoder.start()
            log.info("loaded %s", policy.describe())
        except Exception as error:  # report any failure instead of waiting for ever
            if not isinstance(error, EarnestError):
                log.exception("the model could not be loaded")
            self.failure = reason(error)
        finally:
            self._ready.set()

    def ready(self) -> bool:
        return self._ready.is_set() and self.failure is None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the policy is loaded; ``Loading`` if it is not."""
        if not self._ready.wait(timeout):
            raise self._loading()
        if self.failure is not None:
            raise Loading(f"the model {self.settings.model} could not be loaded: {self.failure}")

    def _loading(self) -> Loading:
        return Loading(f"the model {self.settings.model} is still being loaded; try again in a moment.")

    def _loaded(self) -> tuple[Policy, Text, Decoder]:
        if self._parts is None:
            raise self._loading()
        return self._parts

    @property
    def policy(self) -> Policy:
        return self._loaded()[0]

    @property
    def text(self) -> Text:
        """The policy's tokenizer; all access goes through this object."""
        return self._loaded()[1]

    @property
    def decoder(self) -> Decoder:
        return self._loaded()[2]

    @cached_property
    def grammars(self) -> Grammars:
        from earnest.serve.grammar import Grammars

        return Grammars(self.policy)

    def close(self) -> None:
        """Stop the threads; background work under way is abandoned, and nothing of it is kept."""
        self.stopping = True
        if self._thread is not None:
            self._thread.join()
        if self._parts is not None:
            self.decoder.close()

    @contextmanager
    def turn(self, kind: Kind, adapter: Adapter | None = None) -> Iterator[Turn]:
        """All torch work happens inside a turn, with only ``adapter`` active, or none. A thread that holds a turn
        already continues with it."""
        held: Turn | None = getattr(self._of_thread, "turn", None)
        if held is not None:
            with self.only(adapter):
                yield held
            return
        ticket = self.turns.acquire(kind)
        turn = self._of_thread.turn = Turn(self, ticket)
        try:
            with self.only(adapter):
                yield turn
        finally:
            self._of_thread.turn = None
            self._set({})
            self.turns.release(ticket)

    @contextmanager
    def only(self, adapter: Adapter | None) -> Iterator[None]:
        """Only this adapter is active inside the block."""
        before = self._scales()
        self._set({} if adapter is None else {adapter.name: 1.0})
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def rows(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Inside the block row i of a batch runs with ``adapters[i]`` (None: the base)."""
        named = {a.name: a for a in adapters if a is not None}
        if len(named) <= 1 and (None not in adapters or not named):
            with self.only(next(iter(named.values()), None)):
                yield
            return
        from earnest.adapters.adapter import rows

        before = self._scales()
        self._set(dict.fromkeys(named, 1.0))
        try:
            with rows(self.policy, adapters, self._adapters.values()):
                yield
        finally:
            self._set(before)

    def _scales(self) -> dict[str, float]:
        return {name: a.scale for name, a in self._adapters.items() if a.scale != 0.0}

    def _set(self, scales: dict[str, float]) -> None:
        for name, adapter in self._adapters.items():
            wanted = scales.get(name, 0.0)
            if adapter.scale != wanted:
                adapter.scale = wanted

    def attach(self, name: str, variant: Variant, **how: Any) -> Adapter:
        """Put a new adapter on the policy, inactive; ``how`` goes to ``earnest.attach``."""
        from earnest.adapters import attach

        return self._add(name, lambda: attach(self.policy, variant, name=name, **how))

    def mount(self, name: str, folder: Path) -> Adapter:
        """Put a saved adapter on the policy, inactive."""
        from earnest.adapters import load_adapter

        return self._add(name, lambda: load_adapter(self.policy, folder, name=name, expressions=False))

    def _add(self, name: str, make: Callable[[], Adapter]) -> Adapter:
        with self.turn("load"):
            if name in self._adapters:
                raise EarnestError(f"there is an adapter {name!r} on the model already; detach it first.")
            adapter = make()
            if adapter.replaces:
                adapter.detach()
                raise EarnestError(
                    f"{name!r} trains whole modules ({adapter.variant.name}), and this server gives the rows of a "
                    "batch different adapters; serve the trained model as the base: `earnest serve --model FOLDER`."
                )
            adapter.scale = 0.0
            self._adapters[name] = adapter
            return adapter

    def detach(self, name: str) -> None:
        with self.turn("load"):
            self._adapters.pop(name).detach()

    def attached(self) -> tuple[str, ...]:
        return tuple(self._adapters)

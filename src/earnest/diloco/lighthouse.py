"""The same algorithm for machines that can connect to each other: torchft's own Manager and Lighthouse, gloo all-reduce
in fp32.

The bucket then holds the settings, a report on each round and, at some rounds, a whole state for the launcher. The
replicas agree on rounds over the network, and torchft brings a late replica to the state of a running one. torchft's
average has no weights: every replica counts the same, however many tokens it trained on.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor

from earnest.diloco.errors import Unreachable
from earnest.diloco.globals import Globals
from earnest.diloco.ledger import Ledger
from earnest.diloco.outer import ReplicaProgress, SyncSchedule, WeightCopies, algorithm, copy_state
from earnest.errors import CheckpointError, MissingExtra


class LighthouseOuter(ReplicaProgress):
    """One replica's outer hook over a Lighthouse; the same interface as ``ReplicaOuter``."""

    def __init__(
        self,
        engine: Any,
        ledger: Ledger,
        replica: int,
        address: str,
        quorum: int,
        schedule: SyncSchedule,
        *,
        rounds: int,
        snapshot_every: int = 10,
        timeout: float = 3600.0,
    ) -> None:
        self.ledger, self.replica, self.schedule, self.rounds = ledger, replica, schedule, rounds
        self.snapshot_every = snapshot_every
        self.weights = WeightCopies(engine, schedule.fragments)
        self.meta: dict[str, Any] = {}
        self.inner = self.heals = self._tokens_before = 0
        self.manager, self._server = _manager(address, replica, quorum, timeout, self._load, self._save)
        self._algorithm, self.tick = algorithm(self.manager, self.weights, schedule)
        self._algorithm.__enter__()

    def _save(self) -> dict[str, Tensor]:
        return {str(i): c.detach().clone() for i, c in enumerate(self.weights.copies)}

    @torch.no_grad()
    def _load(self, state: Mapping[str, Tensor]) -> None:
        self.heals += 1
        for i, copy in enumerate(self.weights.copies):
            copy.copy_(state[str(i)])

    @property
    def round(self) -> int:
        return int(self.manager.current_step())

    def join(self, engine: Any) -> bool:
        """Begin with the newest state in the bucket (the first replica writes its own there). A late
        replica gets the state from a running one; one that joins after the end has nothing to do."""
        if not self.ledger.states():
            self._snapshot()
        held = self.agreed()
        held.recover(self.ledger)
        self.weights.become(held)
        self.weights.push(engine)
        if self.schedule.outer is not None:
            self._algorithm._save_parameters()
            for fragment, known in zip(self._algorithm._fragments, held.fragments, strict=True):
                fragment._outer_optimizer.load_state_dict(copy_state(known.optimizer))
        self.manager.load_state_dict({"step": held.round, "batches_committed": held.round})
        self._tokens_before = engine.tokens
        return False

    def after_update(self, engine: Any) -> Mapping[str, float]:
        if self.over:
            return {}
        self.inner += 1
        interval, last = self.schedule.interval, self.inner == self.schedule.interval
        if self.inner == interval - self.schedule.delay and self.rounds in self.ledger.states():
            self.join(engine)  # the others have finished: there is no round to join
            self.inner = 0
            return {"healed": 1.0, "round": float(self.round)}
        if self.inner == interval - self.schedule.delay or last:
            self.weights.pull(engine)
        before, heals = self.round, self.heals
        self.tick.step()
        if not last:
            if self.heals > heals:  # with a delay torchft heals it when it sends; it trains on from there
                self.weights.push(engine)
                self._tokens_before = engine.tokens
            return {}
        self.weights.push(engine)
        self.inner = 0
        if self.round == before:
            # torchft went back to the start of the round, so these tokens count for nothing
            self._tokens_before = engine.tokens
            return {"round": float(before), "failed": 1.0}
        # after healing it may be more than one round
        done, members = self.round - 1, int(self.manager.num_participants())
        tokens, self._tokens_before = engine.tokens - self._tokens_before, engine.tokens
        size = 4 * sum(c.numel() for c in self.weights.tensors()[done % self.schedule.fragments])
        self.ledger.put_report(done, self.replica, {**self.meta, "members": members, "tokens": tokens, "bytes": size})
        turn = self.round // self.snapshot_every % members == self.manager.participating_rank()
        ended = self.round >= self.rounds
        # Any replica that finds the last state missing writes it: the one whose turn it is may have died.
        if (turn and self.round % self.snapshot_every == 0) or (ended and self.round not in self.ledger.states()):
            self._snapshot()
        return {"round": float(done), "members": float(members), "bytes_delta": float(size), "failed": 0.0}

    def agreed(self) -> Globals:
        """The global weights and the outer optimizers' state as torchft holds them."""
        if self.schedule.outer is None:
            return Globals(self.weights.tensors(), None)
        fragments = self._algorithm._fragments
        held = Globals([list(f.original_parameters.values()) for f in fragments], self.schedule.outer)
        tensors = held.tensors()
        for i, fragment in enumerate(fragments):
            for j, entry in fragment._outer_optimizer.state_dict()["state"].items():
                if entry.get("momentum_buffer") is not None:
                    tensors[f"{i}.momentum.{j}"] = entry["momentum_buffer"]
        held.load(tensors, self.round)
        return held

    def _snapshot(self) -> None:
        held = self.agreed()
        self.ledger.put_state(held.round, held.pack(), held.fingerprint())

    def close(self) -> None:
        self.manager.shutdown(wait=False)

    def state_dict(self) -> dict[str, Tensor]:
        raise CheckpointError("replicas on a Lighthouse keep no checkpoint; a running one restores the others.")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.state_dict()


def _manager(address: str, replica: int, quorum: int, timeout: float, load: Any, save: Any) -> tuple[Any, Any]:
    """torchft's Manager with a store of its own; it advertises a name under which others reach this machine."""
    try:
        from torchft import Manager, ProcessGroupGloo
    except ImportError:
        raise MissingExtra("torchft", "diloco", "sync.lighthouse") from None
    from torch.distributed import TCPStore

    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.ERROR)
    here = urlparse(address).hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0")
    host = "localhost" if here else socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    wait = timedelta(seconds=timeout)
    try:
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=min(60.0, timeout))),
            load_state_dict=load,
            state_dict=save,
            min_replica_size=quorum,
            use_async_quorum=False,
            timeout=timedelta(seconds=min(60.0, timeout)),
            quorum_timeout=wait,
            connect_timeout=timedelta(seconds=min(60.0, timeout)),
            replica_id=f"replica-{replica}",
            store_addr=host,
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=address,
            hostname=host,
            init_sync=False,  # everybody began with the bucket's state
        )
    except RuntimeError as error:
        if "failed to connect" not in str(error):
            raise
        raise Unreachable(
            f"sync.lighthouse={address} does not answer: start it (`torchft_lighthouse --min_replicas {quorum}`), "
            f"correct the address (http://host:port), or leave it out to use the bucket. torchft's message: {error}"
        ) from None
    return manager, store

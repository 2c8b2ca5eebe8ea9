"""The Manager that averages for torchft's DiLoCo and LocalSGD, through a bucket instead of a process group.

It offers the eight members that they use (docs/diloco.md lists them). Tensors given to ``allreduce`` are gathered; the
first ``wait`` sends them as one vector and fills them with the round's average.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from earnest.diloco.errors import DivergedState
from earnest.diloco.globals import Globals, split
from earnest.diloco.ledger import Commit, Ledger
from earnest.diloco.protocol import Contribution, RoundResult, Rules, digest, finish_round
from earnest.diloco.wire import Vector, Wire, decode


class Gathered:
    """The promise of an average: what torchft calls a Work."""

    def __init__(self, manager: BucketManager) -> None:
        self._manager = manager

    def wait(self, timeout: Any = None) -> bool:
        self._manager.finish()
        return True


@dataclass
class BucketManager:
    """One replica's side of the meetings. ``globals`` is what the replicas agree on; rounds count from its own."""

    ledger: Ledger
    rules: Rules
    replica: int
    globals: Globals
    wire: Wire
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    tokens: int = 0
    """Tokens that the delta was trained on: this replica's weight in the average."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Written with the next delta, for the launcher."""
    residual: dict[int, Vector] = field(default_factory=dict)
    """By fragment: what a lossy wire has not sent yet."""
    last: dict[str, float] = field(default_factory=dict)
    """Numbers of the last round, for the report."""

    _use_async_quorum = False  # read by torchft

    def __post_init__(self) -> None:
        self._gathered: list[Tensor] = []
        self._states: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self._met: RoundResult | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._vector: Vector | None = None
        self._payload = b""

    # --- what torchft calls -------------------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Mapping[str, Any]]
    ) -> None:
        del load_state_dict  # a replica is brought back by building the algorithm anew on the right weights
        self._states[key] = state_dict

    def disallow_state_dict_read(self) -> None:
        """Nobody reads our weights: they come from the bucket."""

    def allow_state_dict_read(self) -> None:
        """Nobody reads our weights: they come from the bucket."""

    def start_quorum(self, allow_heal: bool = True, shrink_only: bool = False, timeout: Any = None) -> None:
        del allow_heal, shrink_only, timeout
        self._gathered, self._met, self._failure, self._vector = [], None, None, None

    def current_step(self) -> int:
        return self.globals.round

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = None) -> Gathered:
        del should_quantize, reduce_op  # torchft asks for AVG, always; the wire decides on quantisation
        self._gathered.append(tensor)
        return Gathered(self)

    def should_commit(self, timeout: Any = None) -> bool:
        """True, always: a round that cannot be finished raises. The agreed state moves with it."""
        del timeout
        met = self._met
        assert met is not None, "torchft asked to commit before it waited"
        if self.wire.lossy and self._vector is not None and self._is_mine(met.sent):
            self.residual[self.globals.round % len(self.globals.fragments)] = self._vector - met.sent
        self.globals.advance(met.average)
        self._gathered = []
        return True

    def _is_mine(self, sent: Vector | None) -> TypeGuard[Vector]:
        """Whether what was averaged in this replica's name is what it has now. Another life of it may have sent
        something else: then nothing of its own was sent, and what was left over before is left over still."""
        return sent is not None and torch.equal(sent, decode(self._payload, sent.numel()))

    def reset(self) -> None:
        """Forget what was gathered and the registered states: the algorithm is about to be built again."""
        self.start_quorum()
        self._states.clear()

    # --- the meeting --------------------------------------------------------------------------------------------------

    @property
    def commit(self) -> Commit:
        """The decision on the round that was finished last."""
        assert self._met is not None, "no round was finished yet"
        return self._met.commit

    @property
    def pending(self) -> bool:
        """Whether something was gathered that is not averaged yet."""
        return bool(self._gathered) and self._met is None

    def begin(self) -> None:
        """Meet in the background; ``finish`` waits for it. Inner steps go on meanwhile."""
        if self.pending and self._thread is None:
            self._thread = threading.Thread(target=self._in_background, daemon=True)
            self._thread.start()

    def _in_background(self) -> None:
        try:
            self._meet()
        except BaseException as error:
            self._failure = error

    def finish(self) -> None:
        """Wait for the round's average; it is then in the tensors that were gathered."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._met is None:
            self._meet()
        assert self._met is not None
        for tensor, part in zip(self._gathered, split(self._met.average, self._gathered), strict=True):
            tensor.copy_(part)

    def _meet(self) -> None:
        began, traffic = self.clock(), self.ledger.bucket.traffic
        before = (traffic.sent, traffic.received, traffic.requests, traffic.retries)
        fragment = self.globals.round % len(self.globals.fragments)
        vector = torch.cat([t.detach().reshape(-1).float().cpu() for t in self._gathered])
        if fragment in self.residual:
            vector = vector + self.residual[fragment]
        if not bool(torch.isfinite(vector).all()):
            self.residual.pop(fragment, None)  # it may be what is wrong, and would be so in every round from now on
            raise DivergedState("the weights are not finite")
        self._vector = vector
        self._payload = payload = self.wire.encode(vector, self.globals.current.flat())
        mine = Contribution(
            self.globals.round, self.replica, self.held(), payload, self.tokens, vector.numel(), dict(self.meta)
        )
        meeting = finish_round(self.ledger, self.rules, mine, self.globals.outcome, self.clock)
        while True:
            try:
                pause = next(meeting)
            except StopIteration as end:
                met: RoundResult = end.value
                break
            if pause:
                self.sleep(pause)
        sent, received, requests, retries = before
        self.last = {
            "round": float(mine.round),
            "members": float(len(met.commit.members)),
            "averaged": float(met.sent is not None),
            "superseded": float(met.superseded),
            "damaged": float(met.damaged),
            "bytes_delta": float(len(payload)),
            "bytes_sent": float(traffic.sent - sent),
            "bytes_received": float(traffic.received - received),
            "requests": float(traffic.requests - requests),
            "retries": float(traffic.retries - retries),
            "seconds": self.clock() - began,
        }
        self._met = met

    def held(self) -> str:
        """Fingerprint of the global state as torchft holds it: what this replica's delta is a difference to."""
        if not self._states:
            return self.globals.fingerprint()
        fragments = []
        for key in sorted(self._states, key=lambda k: int(k.rsplit("_", 1)[1])):
            state = self._states[key]()
            tensors = {f"weight.{i}": t for i, t in enumerate(state["original_parameters"].values())}
            for i, entry in state["outer_optimizer"]["state"].items():
                if entry.get("momentum_buffer") is not None:
                    tensors[f"momentum.{i}"] = entry["momentum_buffer"]
            fragments.append(digest([tensors[name] for name in sorted(tensors)]))
        return self.globals.chain(fragments)

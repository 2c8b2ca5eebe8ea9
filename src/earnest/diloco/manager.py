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
from earnest.diloco.groups import finish_in_groups, of_group
from earnest.diloco.ledger import Commit, Ledger
from earnest.diloco.protocol import Contribution, RoundResult, Rules, digest, finish_round
from earnest.diloco.wire import FlatVector, Wire, decode


@dataclass
class BucketManager:
    """One replica's part of each round. ``globals`` is the state that the replicas agree on; it has the round's
    number. torchft calls the public methods up to ``should_commit``."""

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
    residual: dict[int, FlatVector] = field(default_factory=dict)
    """By fragment: what a lossy wire has not sent yet."""
    last: dict[str, float] = field(default_factory=dict)
    """Numbers of the last round, for the report."""
    groups: int = 1
    """1: one level; more: see groups.py."""

    _use_async_quorum = False  # read by torchft

    def __post_init__(self) -> None:
        self._gathered: list[Tensor] = []
        self._states: dict[str, Callable[[], Mapping[str, Any]]] = {}
        self._result: RoundResult | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._vector: FlatVector | None = None
        self._payload = b""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Mapping[str, Any]]
    ) -> None:
        del load_state_dict  # recovery builds the algorithm again on the agreed weights
        self._states[key] = state_dict

    def disallow_state_dict_read(self) -> None:
        """Does nothing: other replicas read weights from the bucket only."""

    def allow_state_dict_read(self) -> None:
        """Does nothing: other replicas read weights from the bucket only."""

    def start_quorum(self, allow_heal: bool = True, shrink_only: bool = False, timeout: Any = None) -> None:
        self._gathered, self._result, self._failure, self._vector = [], None, None, None

    def current_step(self) -> int:
        return self.globals.round

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = None) -> BucketManager:
        """The manager itself stands for torchft's Work."""
        del should_quantize, reduce_op  # torchft always passes AVG; the wire decides on quantization
        self._gathered.append(tensor)
        return self

    def wait(self, timeout: Any = None) -> bool:
        """Fill the gathered tensors with the average."""
        self.finish()
        return True

    def should_commit(self, timeout: Any = None) -> bool:
        """Always True (a round that cannot be finished raises); also applies the average to the agreed state."""
        result = self._result
        assert result is not None, "torchft called should_commit before wait"
        if self.wire.lossy and self._vector is not None and self._sent_by_this_process(result.sent):
            self.residual[self.globals.round % len(self.globals.fragments)] = self._vector - result.sent
        self.globals.advance(result.average)
        self._gathered = []
        return True

    def _sent_by_this_process(self, sent: FlatVector | None) -> TypeGuard[FlatVector]:
        """Whether the delta that was averaged for this replica is the one that this process sent. An earlier process
        with the same number may have sent another: then this one sent nothing, and its residual stays as it was."""
        return sent is not None and torch.equal(sent, decode(self._payload, sent.numel()))

    def reset(self) -> None:
        """Forget what was gathered and the registered states: the algorithm is about to be built again."""
        self.start_quorum()
        self._states.clear()

    @property
    def member(self) -> int:
        """This replica's number among the members of a commit: its own, or its group's."""
        return self.replica % self.groups if self.groups > 1 else self.replica

    def announce(self) -> None:
        """Let the others wait for this replica in the present round."""
        self.ledger.announce(self.globals.round, self.member)
        if self.groups > 1:
            of_group(self.ledger, self.member).announce(self.globals.round, self.replica)

    def clean_group(self, before: int) -> None:
        """Remove the group's deltas before this round; one of its members does it."""
        group = self._result.group if self._result is not None else None
        if group is not None and group.members[0] == self.replica:
            of_group(self.ledger, self.member).clean(before)

    @property
    def commit(self) -> Commit:
        """The decision on the round that was finished last."""
        assert self._result is not None, "no round was finished yet"
        return self._result.commit

    @property
    def pending(self) -> bool:
        """Whether something was gathered that is not averaged yet."""
        return bool(self._gathered) and self._result is None

    def begin(self) -> None:
        """Exchange deltas in the background while inner steps continue; ``finish`` waits for the result."""
        if self.pending and self._thread is None:
            self._thread = threading.Thread(target=self._in_background, daemon=True)
            self._thread.start()

    def _in_background(self) -> None:
        try:
            self._exchange()
        except BaseException as error:
            self._failure = error

    def finish(self) -> None:
        """Wait for the round's average; it is then in the tensors that were gathered."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._result is None:
            self._exchange()
        assert self._result is not None
        for tensor, part in zip(self._gathered, split(self._result.average, self._gathered), strict=True):
            tensor.copy_(part)

    def _exchange(self) -> None:
        began, traffic = self.clock(), self.ledger.bucket.traffic
        before = (traffic.sent, traffic.received, traffic.requests, traffic.retries)
        fragment = self.globals.round % len(self.globals.fragments)
        vector = torch.cat([t.detach().reshape(-1).float().cpu() for t in self._gathered])
        if fragment in self.residual:
            vector = vector + self.wire.kept * self.residual[fragment]
        if not bool(torch.isfinite(vector).all()):
            self.residual.pop(fragment, None)  # the residual itself may be the cause, and would be in every later round
            raise DivergedState("the weights are not finite")
        self._vector = vector
        self._payload = payload = self.wire.encode(vector, self.globals.current.flat())
        mine = Contribution(
            self.globals.round, self.replica, self.held(), payload, self.tokens, vector.numel(), dict(self.meta)
        )
        if self.groups > 1:
            meeting = finish_in_groups(self.ledger, self.rules, mine, self.groups, self.globals.outcome, self.clock)
        else:
            meeting = finish_round(self.ledger, self.rules, mine, self.globals.outcome, self.clock)
        while True:
            try:
                pause = next(meeting)
            except StopIteration as end:
                result: RoundResult = end.value
                break
            if pause:
                self.sleep(pause)
        sent, received, requests, retries = before
        self.last = {
            "round": float(mine.round),
            "members": float(len((result.group or result.commit).members)),
            "averaged": float(result.sent is not None),
            "superseded": float(result.superseded),
            "damaged": float(result.damaged),
            "bytes_delta": float(len(payload)),
            "bytes_sent": float(traffic.sent - sent),
            "bytes_received": float(traffic.received - received),
            "requests": float(traffic.requests - requests),
            "retries": float(traffic.retries - retries),
            "seconds": self.clock() - began,
        }
        self._result = result

    def held(self) -> str:
        """Fingerprint of the global state as torchft holds it: this replica's delta is the difference from it."""
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

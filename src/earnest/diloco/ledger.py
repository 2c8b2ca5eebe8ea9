"""The keys of a run, and what each holds. Rounds count from 0; every key is created once and never changed.

config.yaml                     the run's settings
workers/{i}                     replica number i is taken
outer/{k}/announced/{i}         replica i began round k; the others wait for it
outer/{k}/delta/{i}             start of round k minus the weights of replica i after its inner steps
outer/{k}/report/{i}            replica i's report on round k, where it was averaged over the network
outer/{k}/commit                who is averaged, in which order, with which tokens; and the hashes before and after
state/{k}                       the weights at the start of round k, with the outer optimizer's state
versions/{n}                    weights for samplers
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from earnest.diloco.errors import RoundStuck
from earnest.diloco.signing import Signatures
from earnest.store import Bucket, Damaged, Object

CONFIG = "config.yaml"
PARALLEL = 8
"""Deltas that a replica reads at once: enough to hide a store's latency, few enough for its memory."""


@dataclass(frozen=True)
class Commit:
    """The decision on a round: ``members`` are averaged in this order, weighted by ``tokens``; ``attempts`` are
    the numbers of the members' deltas.

    ``start`` and ``result`` are fingerprints of the global state before and after: commits form a chain from state 0.
    """

    round: int
    members: tuple[int, ...]
    attempts: tuple[int, ...]
    tokens: tuple[int, ...]
    start: str
    result: str


@dataclass(frozen=True)
class Ledger:
    bucket: Bucket
    parallel: int = PARALLEL
    signatures: Signatures | None = None
    """Signs this replica's deltas and checks everybody's, in a run with ``sync.signers``."""

    def put_config(self, text: str, meta: Mapping[str, Any]) -> bool:
        return self.bucket.create(CONFIG, "config", text.encode(), meta)

    def config(self) -> Object | None:
        return self.bucket.get(CONFIG)

    def reserve(self, number: int) -> bool:
        """Take a replica number; False where it is taken."""
        return self.bucket.create(f"workers/{number:05d}", "worker", meta={"replica": number})

    def claim(self) -> int:
        """Take the smallest free replica number."""
        taken = set(_numbers(self.bucket.list("workers/")))
        number = 0
        while number in taken or not self.reserve(number):
            taken.add(number)
            number += 1
        return number

    def announce(self, k: int, replica: int) -> None:
        self.bucket.create(f"outer/{k:08d}/announced/{replica:05d}", "announced")

    def put_delta(self, k: int, replica: int, attempt: int, payload: bytes, meta: Mapping[str, Any]) -> bool:
        """Write a delta; False where another process with the same replica number was first."""
        if self.signatures is not None:
            meta = {**meta, "signature": self.signatures.sign(payload, meta)}
        return self.bucket.create(_delta(k, replica, attempt), "delta", payload, meta)

    def delta(self, k: int, replica: int, attempt: int = 0) -> Object | None:
        """The delta; ``Damaged`` if its hash or, in a run with signers, its signature is wrong."""
        found = self.bucket.get(_delta(k, replica, attempt))
        return found if found is None or self.signatures is None else self.signatures.check(found, replica)

    def deltas(self, k: int, whose: Sequence[tuple[int, int]]) -> list[Object | Damaged | None]:
        """The deltas of these (replica, attempt), in this order, read ``parallel`` at a time. For a damaged one
        the list has its ``Damaged`` error; the caller decides what to do."""

        def read(who: tuple[int, int]) -> Object | Damaged | None:
            try:
                return self.delta(k, *who)
            except Damaged as error:
                return error

        if self.parallel < 2 or len(whose) < 2:
            return [read(who) for who in whose]
        with ThreadPoolExecutor(min(self.parallel, len(whose)), "deltas") as pool:
            return list(pool.map(read, whose))

    def present(self, k: int) -> tuple[list[tuple[int, int]], list[int]]:
        """((replica, attempt) of each delta, replicas that announced themselves), from one listing."""
        found = [m.groups() for key in self.bucket.list(f"outer/{k:08d}/") if (m := _MEMBER.search(key))]
        deltas = [(int(replica), int(attempt or 0)) for kind, replica, attempt in found if kind == "delta"]
        return sorted(deltas), [int(replica) for kind, replica, _ in found if kind == "announced"]

    def put_report(self, k: int, replica: int, meta: Mapping[str, Any]) -> None:
        """Write a replica's report on a round that was averaged over the network, for the launcher."""
        self.bucket.create(f"outer/{k:08d}/report/{replica:05d}", "report", meta=meta)

    def reports(self, k: int) -> list[Object]:
        """The reports on round ``k``, by replica."""
        found = (self.bucket.get(key) for key in self.bucket.list(f"outer/{k:08d}/report/") if _MEMBER.search(key))
        return [one for one in found if one is not None]

    def commit(self, k: int) -> Commit | None:
        try:
            found = self.bucket.get(f"outer/{k:08d}/commit")
        except Damaged as error:
            raise RoundStuck(f"the decision on round {k} cannot be read ({error}); restore that object.") from None
        if found is None:
            return None
        data: dict[str, Any] = json.loads(found.payload)
        data |= {name: tuple(data[name]) for name in ("members", "attempts", "tokens")}
        return Commit(**data)

    def put_commit(self, commit: Commit) -> Commit:
        """The decision that holds: this one, or the one that was written first."""
        payload = json.dumps(asdict(commit)).encode()
        if self.bucket.create(f"outer/{commit.round:08d}/commit", "commit", payload):
            return commit
        found = self.commit(commit.round)
        if found is None:
            raise RoundStuck(
                f"the decision on round {commit.round} was there and is gone from {self.bucket.url}; restore it."
            )
        return found

    def committed(self) -> int:
        k = max(self.states(), default=0)
        while self.commit(k) is not None:
            k += 1
        return k

    def states(self) -> list[int]:
        """Rounds at whose start the state was written."""
        return _numbers(self.bucket.list("state/"))

    def put_state(self, k: int, payload: bytes, fingerprint: str) -> bool:
        return self.bucket.create(f"state/{k:08d}", "state", payload, {"round": k, "fingerprint": fingerprint})

    def state(self, k: int) -> Object | None:
        return self.bucket.get(f"state/{k:08d}")

    def clean(self, before: int) -> int:
        """Remove deltas, announcements and states before ``before``; returns the number of removed objects.

        Commits stay, at some hundred bytes each: a replica that was paused since an old round must find that the round
        is decided. Without the commit it would decide the round a second time.
        """
        rounds = [(key, _ROUND.match(key)) for key in self.bucket.list("outer/") if _MEMBER.search(key)]
        old = [key for key, k in rounds if k and int(k[1]) < before]
        old += [f"state/{k:08d}" for k in self.states() if k < before]
        self.bucket.delete(old)
        return len(old)


# Other programs leave keys of their own in a bucket (.DS_Store, a manifest); only these are the run's.
_ROUND = re.compile(r"^outer/(\d{8})/")
_MEMBER = re.compile(r"/(announced|delta|report)/(\d{5})(?:~(\d+))?$")
_NUMBERED = re.compile(r"/(\d+)$")


def _numbers(keys: Sequence[str]) -> list[int]:
    """The numbers at the end of these keys; keys without one are not the run's."""
    return [int(found[1]) for key in keys if (found := _NUMBERED.search(key))]


def _delta(k: int, replica: int, attempt: int) -> str:
    return f"outer/{k:08d}/delta/{replica:05d}" + (f"~{attempt}" if attempt else "")

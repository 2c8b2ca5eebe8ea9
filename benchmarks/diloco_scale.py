"""How the protocol scales, by simulation: requests, bytes, seconds and money of one round of N replicas.

    python benchmarks/diloco_scale.py            prints a table for N = 4 … 1,000, flat and in groups

Per round a replica announces itself, writes its delta, reads the commit and lists the round after every
``Rules.pause``, and reads the deltas, ``PARALLEL`` at once: the protocol's own rules, not a copy. *Flat* is one level:
every replica reads every delta, N² reads. *Groups* is ``sync.groups`` = √N: the groups commit and average among
themselves, one member of each writes the group's mean as a delta of the next level, and every replica reads √N of
those: 2·N·√N reads. Both levels are the same protocol with the same keys under another prefix.
`experiments/evidence/layout.py` compares both with 16 processes.

The store is a queue: requests of one prefix are served at a limited rate (S3: 3,500 writes and 5,500 reads a second and
prefix, as its documentation has it), each with a latency from a lognormal distribution; a replica has a bandwidth of
its own. Training times vary by a factor, so the last replica, or the grace window, decides when a round can be
committed.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from earnest.diloco.ledger import PARALLEL
from earnest.diloco.protocol import Rules
from earnest.errors import ConfigError


@dataclass(frozen=True)
class Shop:
    """A store's speed and prices (USD), as S3 Standard lists them; change them for yours."""

    write_rate: float = 3500.0
    read_rate: float = 5500.0
    write_seconds: float = 0.045
    read_seconds: float = 0.020
    list_seconds: float = 0.080
    page: int = 1000
    spread: float = 0.5
    """Of the logarithm of a latency."""
    per_write: float = 5e-6
    per_read: float = 4e-7


@dataclass(frozen=True)
class Fleet:
    """N replicas and what they bring. ``delta`` in bytes; how they wait is in ``rules``, None: a run's own defaults."""

    replicas: int
    delta: float = 5e6
    train_seconds: float = 120.0
    train_spread: float = 0.1
    bandwidth: float = 1.25e8
    rules: Rules | None = None
    mean_life: float = 6 * 3600.0
    restart_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; simulate at least 1.")


@dataclass(frozen=True)
class Round:
    """One round's cost. Seconds are those after the last delta was there, the median over draws."""

    replicas: int
    layout: str
    reads: float
    writes: float
    lists: float
    hottest: float
    """Reads of the busiest key."""
    gigabytes: float
    """Read by each replica."""
    commit_seconds: float
    meet_seconds: float
    dollars: float
    goodput: float


def simulate(fleet: Fleet, layout: str, shop: Shop | None = None, draws: int = 200, seed: int = 0) -> Round:
    """A round of this fleet: ``layout`` is "flat" or "groups"."""
    shop = shop or Shop()
    if layout not in ("flat", "groups"):
        raise ConfigError(f"layout {layout!r} is unknown; it is 'flat' or 'groups'.")
    n = fleet.replicas
    group = n if layout == "flat" else max(1, math.isqrt(n))
    levels = 1 if layout == "flat" else 2
    others = n if layout == "flat" else math.ceil(n / group)  # deltas of the second level
    chance = np.random.default_rng(seed)
    came = fleet.train_seconds * np.exp(fleet.train_spread * chance.standard_normal((draws, n)))
    rules = fleet.rules or Rules(n, -(-n // 2))
    waited = np.minimum(came.max(1) - np.median(came, 1), rules.grace)
    pause = np.array([rules.pause(w) for w in waited])  # between two looks, when the last one comes

    def latency(mean: float, size: tuple[int, ...]) -> np.ndarray:
        return mean * np.exp(shop.spread * chance.standard_normal(size) - shop.spread**2 / 2)

    reads_each = group if levels == 1 else group + others
    looks = float(np.mean([rules.looks(w) for w in waited]))  # of a replica that came at the median
    asked = looks + 3  # before its upload, at the end of the round before, and as the start of the next one
    pages = math.ceil(2 * group / shop.page)
    writes = levels * (2 * n + n / group)
    reads = n * reads_each + levels * n * asked
    lists = levels * n * pages * looks
    # commit: the last delta is written; somebody's next poll sees it in a list, reads it, and writes the commit
    per_level = latency(shop.write_seconds, (draws,)) + pause / (group + 1)
    per_level = per_level + latency(shop.list_seconds, (draws, pages)).sum(1) + latency(shop.read_seconds, (draws,))
    commit = levels * (per_level + latency(shop.write_seconds, (draws,)))
    # then everybody reads: limited by its own connections and bandwidth, and by the rate of the prefix
    own = np.maximum(reads_each * shop.read_seconds / PARALLEL, reads_each * fleet.delta / fleet.bandwidth)
    prefixes = 1 if levels == 1 else n / group
    shared = n * reads_each / levels / shop.read_rate / prefixes
    meet = commit + pause / 2 + np.maximum(own, shared)
    length = fleet.train_seconds + waited + meet
    dead = np.minimum(1.0, length / fleet.mean_life)  # of a replica in this round: its round is done again by itself
    useful = fleet.train_seconds * (1 - dead * (0.5 + fleet.restart_seconds / length))
    return Round(
        replicas=n,
        layout=layout,
        reads=reads,
        writes=writes,
        lists=lists,
        hottest=n * asked if levels == 1 else max(float(n), group * asked),
        gigabytes=reads_each * fleet.delta / 1e9,
        commit_seconds=float(np.median(commit)),
        meet_seconds=float(np.median(meet)),
        dollars=float(writes * shop.per_write + lists * shop.per_write + reads * shop.per_read),
        goodput=float(np.median(useful / length)),
    )


def table(delta: float = 5e6) -> str:
    """A markdown table: one row a fleet and layout."""
    lines = [
        "| replicas | layout | reads per round | lists | reads of the busiest key | GB read by each | "
        "commit, s | exchange, s | USD per round | goodput |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n in (4, 16, 64, 256, 1000):
        for layout in ("flat", "groups") if n >= 16 else ("flat",):
            r = simulate(Fleet(n, delta=delta), layout)
            lines.append(
                f"| {n} | {layout} | {r.reads:,.0f} | {r.lists:,.0f} | {r.hottest:,.0f} | {r.gigabytes:.2f} | "
                f"{r.commit_seconds:.2f} | {r.meet_seconds:.1f} | {r.dollars:.3f} | {100 * r.goodput:.0f} % |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")

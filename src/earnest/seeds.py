"""Derived seeds: every random number of a run depends on its seed, a purpose and a step, so no generator's state is
saved."""

from __future__ import annotations

import hashlib


def derive(seed: int, purpose: str, number: int = 0) -> int:
    """A seed below 2⁶² for a purpose and a step; different arguments give unrelated seeds."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2

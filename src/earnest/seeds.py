"""Every random number of a run is a function of its seed and its purpose: resuming needs no generator's state."""

from __future__ import annotations

import hashlib


def derive(seed: int, purpose: str, number: int = 0) -> int:
    """A seed below 2⁶² for a purpose and a step; other arguments give unrelated ones."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2

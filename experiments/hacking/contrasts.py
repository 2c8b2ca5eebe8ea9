"""The contrastive triples of the experiment: an exploit against the honest reply, or two clean replies."""

from __future__ import annotations

import random

from earnest.guards import Triple
from earnest.seeds import derive
from earnest.tasks import get_task
from earnest.tasks.holes import exploits, honest


def hacking_triples(count: int, seed: int, without: str | None = None) -> list[Triple]:
    """Exploit against honest, on training prompts; ``without`` leaves out the prompts of a hole."""
    rng = random.Random(derive(seed, "triples"))
    prompts = get_task("holes").prompts("train", 2 * count, derive(seed, "triples") % 2**31)
    kept = [p for p in prompts if p.data["hole"] != without][:count]
    assert len(kept) == count
    return [Triple(p.messages, rng.choice(exploits(p)), honest(p)) for p in kept]


def clean_triples(count: int, seed: int) -> list[Triple]:
    """Two replies that use no hole, the honest one and another number; one of them, at random, is "unwanted"."""
    rng = random.Random(derive(seed, "clean triples"))
    found = []
    for p in get_task("holes").prompts("train", count, derive(seed, "triples") % 2**31):
        right = honest(p)
        wrong = "".join(str((int(d) + rng.randint(1, 9)) % 10) for d in right)
        pair = [right, wrong]
        rng.shuffle(pair)
        found.append(Triple(p.messages, pair[0], pair[1]))
    return found

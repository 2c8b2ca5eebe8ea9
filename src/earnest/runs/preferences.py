"""Preference pairs from a file as rows of a step. The seed decides the order; an epoch repeats no pair.

A tenth of the traces is held out, chosen by the traces' names. On their pairs an evaluation measures

    accuracy = mean [m_c > m_r],   margin = mean (m_c - m_r),   m = an answer's mean log-prob per token.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earnest.errors import ConfigError
from earnest.models.protocol import PolicyLike
from earnest.models.replies import message_tokens
from earnest.replay.pairs import Pair, read
from earnest.rollouts import PairTokens
from earnest.seeds import derive
from earnest.signals import Batch
from earnest.signals.scorer import Scorer, logprobs

HELDOUT = 0.1


@dataclass(frozen=True)
class Preferences:
    """The pairs of a file, in one policy's tokens. A resumed run compares ``sha256`` and refuses another file."""

    path: str
    sha256: str
    train: tuple[PairTokens, ...]
    heldout: tuple[PairTokens, ...]
    left_out: int

    @classmethod
    def load(cls, path: Path, policy: PolicyLike, say: Callable[[str], None]) -> Preferences:
        """Read and render the pairs. Pairs longer than the policy's context are left out; ``say`` gets their number."""
        found = read(path)
        context = policy.positions or 2**31
        rendered = [(pair, _render(policy, pair)) for pair in found]
        fits = [(p, t) for p, t in rendered if len(t.prompt) + max(len(t.chosen), len(t.rejected)) <= context]
        held = tuple(t for p, t in fits if held_out(p.trace))
        train = tuple(t for p, t in fits if not held_out(p.trace))
        left_out = len(found) - len(fits)
        if not train:
            raise ConfigError(
                f"data: {path} leaves no pair to train on: of {len(found)}, {left_out} are longer than the context of "
                f"{policy.name} ({context} tokens) and {len(held)} are held out; give more pairs."
            )
        note = f", {left_out} left out: longer than {context} tokens" if left_out else ""
        say(f"{len(train)} pairs to train on and {len(held)} held out, from {path}{note}")
        return cls(str(path), hashlib.sha256(path.read_bytes()).hexdigest(), train, held, left_out)

    def describe(self) -> dict[str, Any]:
        sizes = {"pairs": len(self.train), "heldout": len(self.heldout), "left_out": self.left_out}
        return {"file": self.path, "sha256": self.sha256, **sizes}

    def at(self, seed: int, purpose: str, start: int, count: int) -> list[PairTokens]:
        """``count`` pairs from position ``start`` of an endless sequence of epochs, each with its own shuffle."""
        return [self._one(seed, purpose, start + i) for i in range(count)]

    def _one(self, seed: int, purpose: str, place: int) -> PairTokens:
        epoch, offset = divmod(place, len(self.train))
        return self.train[_order(derive(seed, f"{purpose} pairs", epoch), len(self.train))[offset]]

    def measure(self, engine: Scorer) -> dict[str, float]:
        """Accuracy and margin on the held-out pairs; empty if there are none."""
        if not self.heldout:
            return {}
        batch = rows(self.heldout, pad=engine.policy.pad_id, device=engine.policy.device)
        lp = logprobs(engine, batch, "live").double()
        means = [float(lp[batch.row == r].mean()) for r in range(len(batch))]
        margins = [a - b for a, b in zip(means[::2], means[1::2], strict=True)]
        return {
            "pairs/accuracy": sum(m > 0 for m in margins) / len(margins),
            "pairs/margin": sum(margins) / len(margins),
            "pairs/heldout": float(len(margins)),
        }


def held_out(trace: str) -> bool:
    return int.from_bytes(hashlib.sha256(f"held out {trace}".encode()).digest()[:4], "big") / 2**32 < HELDOUT


def rows(pairs: Sequence[PairTokens], **options: Any) -> Batch:
    """Each pair as a chosen row and a rejected row."""
    return Batch.from_rows(
        [t.prompt for t in pairs for _ in range(2)],
        [answer for t in pairs for answer in (t.chosen, t.rejected)],
        role=("chosen", "rejected") * len(pairs),
        pair=[i for i in range(len(pairs)) for _ in range(2)],
        **options,
    )


def _order(seed: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order


def _render(policy: PolicyLike, pair: Pair) -> PairTokens:
    parts = [message_tokens(policy, pair.prompt, answer, pair.tools or None) for answer in (pair.chosen, pair.rejected)]
    return PairTokens(tuple(parts[0][0]), tuple(parts[0][1]), tuple(parts[1][1]))

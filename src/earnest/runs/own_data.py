"""The user's own rows in a run: which rows a step gets, and how the policy does on the held-out ones.

    demonstrations   loss = Σ s_i / Σ t_i     s_i: negative log-likelihood of row i in nats, t_i: its trained tokens
    pairs            accuracy = mean [m_c > m_r],   margin = mean (m_c - m_r),   m = an answer's mean log-prob per token

A step's rows are a function of (seed, step): places in an endless row of epochs, each a shuffle of its own.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from earnest.data.dataset import Dataset, DataSettings
from earnest.data.layouts import Example, Kind
from earnest.data.reading import DataError
from earnest.data.rendering import Rendered
from earnest.models.protocol import PolicyLike
from earnest.rollouts.rows import Row, stack
from earnest.seeds import derive
from earnest.signals import Role
from earnest.signals.scorer import Scorer, logprobs

HELDOUT_SEED = 20_240
"""Not the run's seed: every seed of a recipe is measured on the same questions with the same random numbers."""

ROLES: dict[Kind, tuple[Role, ...]] = {
    "demonstration": ("demonstration",),
    "text": ("demonstration",),
    "pair": ("chosen", "rejected"),
}


@dataclass(frozen=True)
class OwnMeasurement:
    """``value`` is the mean of ``parts``, one per held-out row; ``metrics`` are further numbers."""

    measure: Literal["loss", "accuracy"]
    parts: tuple[float, ...]
    metrics: Mapping[str, float]


class OwnData:
    """A data set in a run of one policy."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.kind = dataset.at("train", 0).kind
        if self.kind not in ROLES:
            assert dataset.layout is not None, "a data set that can be trained on has a layout"
            raise DataError(
                f"data: the rows of {self.path} are {dataset.layout.name} ({', '.join(dataset.layout.columns)}), which "
                "no term trains on; give conversations, prompt and completion, text, or prompt, chosen and rejected."
            )

    @classmethod
    def load(cls, settings: DataSettings, policy: PolicyLike, say: Callable[[str], None]) -> OwnData:
        """Read and check every row; what cannot be trained on raises."""
        made = cls(Dataset.load(settings, policy, policy.positions or 2**31))
        found, counts = made.dataset, made.dataset.counts
        left = {"bad": counts.bad, "too long": counts.too_long, "duplicated": counts.duplicates}
        notes = "".join(f", {count} {name}" for name, count in left.items() if count)
        assert found.layout is not None, "a data set that can be trained on has a layout"
        sizes = f"{found.size('train')} rows to train on and {found.size('heldout')} held out"
        say(f"{sizes}, from {made.path} ({found.layout.name}{notes})")
        return made

    @property
    def path(self) -> str:
        return self.dataset.settings.train

    @property
    def name(self) -> str:
        return Path(self.path).name or self.path

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of the rows that it gives to a batch."""
        return frozenset(ROLES[self.kind])

    def describe(self) -> dict[str, Any]:
        """The part of run.json about the data."""
        counts, found = self.dataset.counts, self.dataset
        assert found.layout is not None, "a data set that can be trained on has a layout"
        names = ("rows", "bad", "too_long", "truncated", "duplicates", "leaked", "trained_tokens")
        return {
            "file": self.path,
            "sha256": found.sha256,
            "layout": found.layout.name,
            "train": found.size("train"),
            "heldout": found.size("heldout"),
            **{name: getattr(counts, name) for name in names},
        }

    # --- rows ---------------------------------------------------------------------------------------------------------

    def rows(self, seed: int, purpose: str, step: int, count: int) -> list[Row]:
        """The rows of ``count`` examples for ``step``, which counts from 1."""
        start = (step - 1) * count
        return self._rows([self.dataset.at("train", self.index(seed, purpose, start + i)) for i in range(count)])

    def index(self, seed: int, purpose: str, place: int) -> int:
        """Which training example is at ``place`` of the endless row of epochs."""
        epoch, offset = divmod(place, self.dataset.size("train"))
        return _order(derive(seed, f"{purpose} rows", epoch), self.dataset.size("train"))[offset]

    def _rows(self, examples: Sequence[Example]) -> list[Row]:
        """Their rows; the group of a row is the number of its example."""
        rows: list[Row] = []
        for number, example in enumerate(examples):
            rendered = self.dataset.rendered(example)
            roles = ROLES[self.kind] if self.kind == "pair" else ROLES[self.kind] * len(rendered)
            pair = number if self.kind == "pair" else -1
            rows += [_row(role, r, number, pair) for role, r in zip(roles, rendered, strict=True)]
        return rows

    # --- the held-out rows --------------------------------------------------------------------------------------------

    def heldout(self, count: int) -> list[Example]:
        """At most ``count`` held-out examples, the same for every seed."""
        size = self.dataset.size("heldout")
        return [self.dataset.at("heldout", i) for i in sorted(_order(HELDOUT_SEED, size)[:count])]

    def measure(self, engine: Scorer, count: int) -> OwnMeasurement | None:
        """Measure the live policy on at most ``count`` held-out rows; None where there are none."""
        examples = self.heldout(count)
        if not examples:
            return None
        batch = stack(self._rows(examples), pad=engine.policy.pad_id, device=engine.policy.device)
        lp = logprobs(engine, batch, "live").double()
        if self.kind == "pair":
            means = [float(lp[batch.row == r].mean()) for r in range(len(batch))]
            margins = [a - b for a, b in zip(means[::2], means[1::2], strict=True)]
            return _preferred(margins)
        owner = batch.group[batch.row]
        zeros = torch.zeros(len(examples), dtype=torch.float64, device=lp.device)
        return _likelihood(
            zeros.index_add(0, owner, -lp).tolist(), zeros.index_add(0, owner, torch.ones_like(lp)).tolist()
        )


def _likelihood(sums: Sequence[float], tokens: Sequence[float]) -> OwnMeasurement:
    """The parts are the loss's influence values L + (s_i - L t_i) n / T: their mean is L, and their standard error is
    that of a ratio of two means."""
    total = sum(tokens)
    loss = sum(sums) / total
    parts = tuple(loss + (s - loss * t) * len(sums) / total for s, t in zip(sums, tokens, strict=True))
    metrics = {"heldout/loss": loss, "heldout/perplexity": math.exp(min(loss, 700.0)), "heldout/tokens": total}
    return OwnMeasurement("loss", parts, metrics | {"heldout/rows": float(len(sums))})


def _preferred(margins: Sequence[float]) -> OwnMeasurement:
    n = len(margins)
    mean = sum(margins) / n
    metrics = {"pairs/accuracy": sum(m > 0 for m in margins) / n, "pairs/margin": mean, "pairs/heldout": float(n)}
    if n > 1:
        metrics["pairs/margin_se"] = math.sqrt(sum((m - mean) ** 2 for m in margins) / (n - 1) / n)
    return OwnMeasurement("accuracy", tuple(float(m > 0) for m in margins), metrics)


def _row(role: Role, rendered: Rendered, group: int, pair: int) -> Row:
    """The prompt ends before the first trained token; later tokens that are not trained get weight 0."""
    start = max(1, rendered.prompt_length)  # nothing predicts the first token of a row
    tokens, trained = rendered.tokens[start:], rendered.trained[start:]
    weights = None if all(trained) else tuple(map(float, trained))
    return Row(role, rendered.tokens[:start], tokens, group, 0, correct=role != "rejected", pair=pair, weights=weights)


@functools.lru_cache(maxsize=4)
def _order(seed: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order

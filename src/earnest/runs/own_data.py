"""The user's own rows in a run: which rows a step gets, and how the policy does on the held-out ones.

    demonstrations   loss = Σ s_i / Σ t_i     s_i: negative log-likelihood of row i in nats, t_i: its trained tokens
    pairs            accuracy = mean [m_c > m_r],   margin = mean (m_c - m_r),   m = an answer's mean log-prob per token
    judged answers   accuracy = mean over wanted a, unwanted b of [r_a > r_b] + ½[r_a = r_b],   r = Σ_t (lp - lp₀)

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
from earnest.runs.comparison import standard_error
from earnest.seeds import derive
from earnest.signals import Role
from earnest.signals.scorer import Scorer, logprobs

HELDOUT_SEED = 20_240
"""Not the run's seed: every seed of a recipe is measured on the same questions with the same random numbers."""

ROLES: dict[Kind, tuple[Role, ...]] = {
    "demonstration": ("demonstration",),
    "text": ("demonstration",),
    "pair": ("chosen", "rejected"),
    "judged": ("chosen", "rejected"),
}


@dataclass(frozen=True)
class OwnMeasurement:
    """The result is the mean of ``parts``, one per held-out row; ``metrics`` are further numbers. ``each`` is a row's
    own number: its loss in nats per trained token, its margin, or for a judged answer its implicit reward (minus it, if
    the answer is unwanted). Of a loss less is better, of the others more."""

    measure: Literal["loss", "accuracy"]
    parts: tuple[float, ...]
    metrics: Mapping[str, float]
    each: tuple[float, ...]


class OwnData:
    """A data set in a run of one policy."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.kind = dataset.at("train", 0).kind
        if self.kind not in ROLES:
            row = dataset.at("train", 0).row
            names = {"prompt": "prompt", "answer": "answer" if "answer" in row else "COLUMN"}
            names |= dataset.settings.columns or {}
            raise DataError(
                f"data: the rows of {self.path} (columns {', '.join(row)}) are questions, which no term trains on "
                "without a grader; to train on answers (sft, for example), give "
                f"data.columns.prompt={names['prompt']} data.columns.completion={names['answer']}; to train with a "
                "reward, give grade=exact or another grader."
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
            pair = number if self.kind == "pair" else -1
            rows += [
                _row(role, r, number, pair) for role, r in zip(_roles(example, len(rendered)), rendered, strict=True)
            ]
        return rows

    def heldout(self, count: int) -> list[Example]:
        """At most ``count`` held-out examples, the same for every seed."""
        return [self.dataset.at("heldout", i) for i in self.heldout_places(count)]

    def heldout_places(self, count: int) -> list[int]:
        """The places of ``heldout(count)`` among all held-out rows; a smaller count gives some of the same places."""
        return sorted(_order(HELDOUT_SEED, self.dataset.size("heldout"))[:count])

    def measure(self, engine: Scorer, count: int) -> OwnMeasurement | None:
        """Measure the live policy on at most ``count`` held-out rows; None where there are none."""
        examples = self.heldout(count)
        if not examples:
            return None
        batch = stack(self._rows(examples), pad=engine.policy.pad_id, device=engine.policy.device)
        lp = logprobs(engine, batch, "live").double()
        if self.kind == "judged":
            wanted = [bool(example.label) for example in examples]
            if len(set(wanted)) < 2:
                raise DataError(
                    f"data.heldout: all {len(wanted)} held-out rows of {self.path} have the label {wanted[0]}, so "
                    "there is nothing to compare; hold out more rows (data.heldout, eval.prompts), or a file of both."
                )
            gap = lp - logprobs(engine, batch, "base").double()
            sums = torch.zeros(len(batch), dtype=torch.float64, device=lp.device).index_add(0, batch.row, gap)
            return _separated(sums.tolist(), wanted)
        if self.kind == "pair":
            means = [float(lp[batch.row == r].mean()) for r in range(len(batch))]
            margins = [a - b for a, b in zip(means[::2], means[1::2], strict=True)]
            return _preferred(margins)
        owner = batch.group[batch.row]
        zeros = torch.zeros(len(examples), dtype=torch.float64, device=lp.device)
        return _likelihood(
            zeros.index_add(0, owner, -lp).tolist(), zeros.index_add(0, owner, torch.ones_like(lp)).tolist()
        )


def _roles(example: Example, rows: int) -> tuple[Role, ...]:
    """The role of each row of tokens that an example gives."""
    if example.kind == "judged":
        return ("chosen" if example.label else "rejected",)
    return ROLES[example.kind] if example.kind == "pair" else ROLES[example.kind] * rows


def _likelihood(sums: Sequence[float], tokens: Sequence[float]) -> OwnMeasurement:
    """The parts are the loss's influence values L + (s_i - L t_i) n / T: their mean is L, and their standard error is
    that of a ratio of two means."""
    total = sum(tokens)
    loss = sum(sums) / total
    parts = tuple(loss + (s - loss * t) * len(sums) / total for s, t in zip(sums, tokens, strict=True))
    perplexity, se = math.exp(min(loss, 700.0)), standard_error(parts)
    metrics = {"heldout/loss": loss, "heldout/perplexity": perplexity, "heldout/tokens": total}
    if se is not None:
        metrics |= {"heldout/loss_se": se, "heldout/perplexity_se": perplexity * se}  # d exp(L) = exp(L) dL
    each = tuple(s / t for s, t in zip(sums, tokens, strict=True))
    return OwnMeasurement("loss", parts, metrics | {"heldout/rows": float(len(sums))}, each)


def _preferred(margins: Sequence[float]) -> OwnMeasurement:
    n = len(margins)
    right = tuple(float(m > 0) for m in margins)
    metrics = {"pairs/accuracy": sum(right) / n, "pairs/margin": sum(margins) / n, "pairs/heldout": float(n)}
    for name, values in (("accuracy", right), ("margin", margins)):
        if (se := standard_error(values)) is not None:
            metrics[f"pairs/{name}_se"] = se
    return OwnMeasurement("accuracy", right, metrics, tuple(margins))


def _separated(rewards: Sequence[float], wanted: Sequence[bool]) -> OwnMeasurement:
    """A row's part is the share of the rows of the other label that are on the right side of it; a tie counts half. The
    mean over the wanted rows equals the mean over the unwanted ones, and so the mean over all."""
    sides = {label: [r for r, own in zip(rewards, wanted, strict=True) if own is label] for label in (True, False)}
    parts = []
    for reward, own in zip(rewards, wanted, strict=True):
        gaps = [(reward - other) if own else (other - reward) for other in sides[not own]]
        parts.append(sum((gap > 0) + 0.5 * (gap == 0) for gap in gaps) / len(gaps))
    metrics = {
        "judged/accuracy": sum(parts) / len(parts),
        "judged/reward_wanted": sum(sides[True]) / len(sides[True]),
        "judged/reward_unwanted": sum(sides[False]) / len(sides[False]),
        "judged/heldout": float(len(wanted)),
    }
    if (se := standard_error(parts)) is not None:
        metrics["judged/accuracy_se"] = se
    each = tuple(reward if own else -reward for reward, own in zip(rewards, wanted, strict=True))
    return OwnMeasurement("accuracy", tuple(parts), metrics, each)


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

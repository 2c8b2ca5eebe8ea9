"""Metrics over ranks, and what ranks draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import Metric, Ranks, Setting
from tests.audit.blind2026.base import Thing, case, clipped, mean, policy


def token_rows() -> Tensor:
    """[N, 2, T]: a value and a mask per token, with very different numbers of tokens."""
    rng = torch.Generator().manual_seed(4)
    values = torch.rand(7, 6, generator=rng)
    counts = torch.tensor([6, 1, 5, 2, 6, 1, 3])
    mask = (torch.arange(6)[None] < counts[:, None]).float()
    return torch.stack([values * mask, mask], 1)


@case("huggingface/trl#6380", "metrics over ranks", "a token mean is taken per rank and then averaged over ranks")
def mean_of_the_ranks_means(broken: bool) -> Thing:
    def metric(shards: list[Tensor]) -> float:
        sums = [s[:, 0].sum() for s in shards]
        counts = [s[:, 1].sum() for s in shards]
        if broken:
            return float(torch.stack([a / b for a, b in zip(sums, counts, strict=True)]).mean())
        return float(torch.stack(sums).sum() / torch.stack(counts).sum())

    return Ranks(metric=metric, rows=token_rows())


@case(
    "huggingface/trl#6380 (extrema)", "metrics over ranks", "the maximum over answers is a maximum of the ranks' means"
)
def maximum_of_the_ranks_means(broken: bool) -> Thing:
    def metric(shards: list[Tensor]) -> float:
        each = [s[:, 0].sum(-1) / s[:, 1].sum(-1) for s in shards]
        return max(float(e.mean() if broken else e.max()) for e in each)

    return Ranks(metric=metric, rows=token_rows())


@case("huggingface/trl#7010", "metrics over ranks", "rows that pad the last batch are counted in the metric")
def padding_rows_are_counted(broken: bool) -> Thing:
    def metric(shards: list[Tensor]) -> float:
        longest = max(len(s) for s in shards)
        if broken:
            shards = [torch.cat([s, s[:1].expand(longest - len(s), *s.shape[1:])]) for s in shards]
        each = torch.cat([s[:, 0].sum(-1) for s in shards])
        return float(each.mean())

    return Ranks(metric=metric, rows=token_rows())


@case("Robbyant/lingbot-vla-v2#41", "metrics over ranks", "every rank draws the same noise")
def ranks_draw_the_same(broken: bool) -> Thing:
    def draw(rank: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(42 if broken else 42 + rank))

    return Ranks(draw=draw)


@case("huggingface/trl#6121", "metrics", "padding enters the entropy with a log-prob of 1, which makes it negative")
def entropy_of_padding(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        logp = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        chosen = logp.gather(-1, batch["ids"][:, 1:, None])[..., 0]
        padding = batch["attention"][:, 1:] == 0
        filled = chosen.masked_fill(padding, 1.0)
        entropy = (-filled).sum(1).mean() if broken else (-filled).masked_fill(padding, 0.0).sum(1).mean()
        surrogate = clipped(chosen, batch["old"], batch["advantages"][:, None], clip)
        return mean(surrogate, batch["mask"]), {"entropy": entropy}

    return policy(loss, metrics={"entropy": Metric(low=0.0)})


@case("huggingface/trl#6140", "metrics", "the entropy bonus is computed without gradients")
def entropy_bonus_without_gradient(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float, bonus: float) -> tuple[Tensor, dict[str, Tensor]]:
        logp = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not broken):
            entropy = mean(-(logp.exp() * logp).sum(-1), batch["mask"])
        chosen = logp.gather(-1, batch["ids"][:, 1:, None])[..., 0]
        surrogate = mean(clipped(chosen, batch["old"], batch["advantages"][:, None], clip), batch["mask"])
        return surrogate - bonus * entropy, {"entropy": entropy}

    return policy(
        loss,
        settings={"clip": Setting(0.2, "clip"), "bonus": Setting(0.01, "weight")},
        metrics={"entropy": Metric(low=0.0, weight="bonus", raises=True)},
    )

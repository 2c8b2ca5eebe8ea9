"""Declarations of reader d's right steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from earnest_audit import (
    AdvantageEstimator,
    ChatTemplate,
    Collator,
    Schedule,
    Setting,
    Step,
)
from tests.audit.reading2026.base import Thing, padded, parts, plain_logps, spread_over, step_of, twinned, whole
from tests.audit.reading2026b.reading import (
    accumulation,
    declare,
    pairs,
    sides,
    text,
    traced,
    unpaired,
    words,
)

Fn = Callable[..., Any]


@declare("d/r01")
def mean_over_turns(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    batch["mask"] = (batch["turn"] > 0).float()

    def loss(model: Any, batch: Any) -> Any:
        return fn(model, {**batch, "turn": batch["turn"] * batch["mask"].long()})

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "mask", "advantages": "advantages"},
        logprobs=plain_logps,
        reduction="mean",
    )


@declare("d/r02")
def role_token_ends_a_turn(m: Any, fn: Fn) -> Thing:
    def tokens(messages: list[Any]) -> Any:
        return fn([{**message, "content": words(message["content"])} for message in messages])

    talk = [{**message, "content": text(message["content"])} for message in m.make(0)["messages"]]
    # an answer ends with the next role's token or with the end of the text, so no one id is declared
    return ChatTemplate(tokens, lambda messages: [*tokens(messages)[0][:-1], m.ROLE["assistant"]], talk)


@declare("d/r03")
def rows_of_a_trajectory(m: Any, fn: Fn) -> Thing:
    def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
        trajectory = torch.tensor([k for k in range(len(rewards)) for _ in range(1 + k % 3)])
        out = fn(rewards.float()[trajectory], groups[trajectory], trajectory)
        first = [int((trajectory == k).nonzero()[0]) for k in range(len(rewards))]
        return out[first]

    return AdvantageEstimator(advantages, scale="free")


@declare("d/r04")
def shared_prefix(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    roles = {"ids": "ids", "advantages": "advantages"}
    return Step(model=model, loss=fn, batch=batch, roles=roles, reduction="mean")


@declare("d/r05")
def joined_stream(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids"},
        family="sft",
        all_supervised=True,
        reduction="mean",
    )


@declare("d/r06")
def mean_over_documents(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "documents": "documents"},
        family="sft",
        all_supervised=True,
        reduction="mean",
    )


@declare("d/r07")
def zigzag(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"ranks": Setting(2, "inert")},
        family="sft",
        reduction="mean",
    )


@declare("d/r08")
def times_the_world_size(m: Any, fn: Fn) -> list[Thing]:
    return spread_over(m, fn)


@declare("d/r09")
def ranks_without_a_target(m: Any, fn: Fn) -> Thing:
    given = m.make(0)
    return accumulation(fn, given, whole(given["batches"]), what="ranks")


@declare("d/r10")
def rate_by_tokens(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, **settings: float) -> list[float]:
        return [fn(k, **settings) for k in range(total)]

    # 16,000 tokens are seen after 120 steps; the peak is at step 50: √2 times the factor at 3,200 tokens
    return Schedule(
        rates,
        peak=1.2e-3,
        final=2e-4,
        total=120,
        warmup=10,
        restarts=True,
        settings={"peak": 1e-3, "warmup_tokens": 640.0, "total_tokens": 16000.0},
    )


@declare("d/r11")
def own_curves(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, **settings: float) -> list[list[float]]:
        optimizer = m.make(0)["optimizer"]
        return traced(optimizer, fn(optimizer, total=total, **settings), total)

    # the groups are embedding, head and body; the head's warm-up ends at step 8, where s is 32/36, so no one number of
    # warm-up steps is declared
    return Schedule(
        rates,
        peak=(1e-2, 8.9e-3, 5e-3),
        final=0.0,
        total=40,
        settings={"warmup": 4.0, "base_width": 8.0, "width": 16.0, "head_delay": 5.0},
    )


@declare("d/r12")
def momentum(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, **settings: float) -> list[float]:
        return [fn(k, total=total, **settings) for k in range(total)]

    settings = {"low": 0.85, "high": 0.95, "rise": 30.0, "fall": 20.0}
    return Schedule(rates, peak=0.95, final=0.85, total=200, warmup=30, settings=settings)


@declare("d/r13")
def fill_in_the_middle(m: Any, fn: Fn) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        ids = padded([r["ids"] for r in out], -1)
        return {"id": torch.tensor([int(r["id"].split("-")[1]) for r in out]), "ids": ids}

    return Collator(stage, m.make(0)["rows"], pads={"ids": -1})


@declare("d/r14")
def left_padding(m: Any, fn: Fn) -> Thing:
    return Collator(
        fn,
        m.make(0)["rows"],
        pads={"ids": 0, "attention_mask": 0, "position_ids": 0, "labels": -100},
        targets=lambda row: [*row["completion"], 0],
    )


@declare("d/r15")
def pass_at_k(m: Any, fn: Fn) -> Thing:
    rows = whole(m.make(0)["parts"])
    return twinned(
        fn,
        m.single,
        lambda shards: [{"prompt": s[:, 0], "correct": s[:, 1]} for s in shards],
        torch.stack([rows["prompt"], rows["correct"]], 1),
    )


@declare("d/r16")
def merged_deviation(m: Any, fn: Fn) -> Thing:
    return twinned(fn, m.single, list, torch.cat(m.make(0)["parts"]))


@declare("d/r17")
def effective_sample_size(m: Any, fn: Fn) -> Thing:
    rows = whole(m.make(0)["parts"])
    return twinned(
        fn,
        m.single,
        lambda shards: [{"log_ratio": s[:, 0], "mask": s[:, 1]} for s in shards],
        torch.stack([rows["log_ratio"], rows["mask"]], 1),
    )


@declare("d/r18")
def value_of_zero(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages"},
        logprobs=plain_logps,
        reduction="mean",
        value_is_loss=False,
    )


@declare("d/r19")
def robust_preference(m: Any, fn: Fn) -> Thing:
    model, flat = parts(m)
    batch = pairs(flat)

    def sums(model: Any, flat: Any) -> Tensor:
        return (plain_logps(model, flat) * flat["loss_mask"][:, 1:]).sum(1)

    return Step(
        model=model,
        loss=lambda model, batch, beta, eps: fn(model, unpaired(batch), beta=beta, eps=eps),
        batch=batch,
        roles={k: k for k in batch},
        settings={"beta": Setting(0.5), "eps": Setting(0.2, "smoothing")},
        logprobs=sides(sums),
        reduction="mean",
    )


@declare("d/r20")
def histogram_of_values(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
        settings={"sigma": Setting(0.075)},
        reduction="mean",
    )

"""Declarations of reader c's right steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import (
    AdvantageEstimator,
    Census,
    Collator,
    Ema,
    Metric,
    OuterStep,
    Ranks,
    Schedule,
    Setting,
    Step,
)
from tests.audit.reading2026.base import Thing, parts, plain_logps, step_of, twinned
from tests.audit.reading2026b.reading import (
    accumulation,
    declare,
    from_second,
    stacked,
)

Fn = Callable[..., Any]


@declare("c/r01")
def constant_budget(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "action_mask", "advantages": "advantages"},
        settings={"max_tokens": Setting(64)},
        logprobs=plain_logps,
        reduction="mean",
    )


@declare("c/r02")
def turns_as_rows(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)
    count = len(batch["advantages"])
    batch["advantages"] = batch["advantages"][batch["rollout"]]  # of each row; rows of a rollout share it

    def loss(model: Any, batch: Any) -> Any:
        rows = torch.zeros(count).index_add(0, batch["rollout"], torch.ones(len(batch["rollout"])))
        each = torch.zeros(count).index_add(0, batch["rollout"], batch["advantages"]) / rows.clamp(min=1)
        return fn(model, {**batch, "advantages": each})

    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "mask": "action_mask", "advantages": "advantages"},
        logprobs=plain_logps,
        reduction="mean",
        rows_interact=True,
    )


@declare("c/r03")
def turn_level_returns(m: Any, fn: Fn) -> Thing:
    def first_turn(rewards: Tensor, groups: Tensor) -> Tensor:
        return fn([[0.0, reward] for reward in rewards.tolist()], groups.tolist())[:, 0]  # two turns each

    return AdvantageEstimator(first_turn, scale="equal")


@declare("c/r04")
def positions_are_not_reset(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "documents": "doc"},
        family="sft",
        all_supervised=True,
        reduction="mean",
    )


@declare("c/r05")
def shared_prompt(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "reference": "ref_logps"},
        settings={"beta": Setting(0.1)},
        family="preference",
        reduction="mean",
    )


@declare("c/r06")
def filler_is_a_document(m: Any, fn: Fn) -> Thing:
    def unpack(batch: Any) -> list[dict[str, Tensor]]:
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0]
        sizes = F.pad(starts, (0, 1), value=batch["position_ids"].shape[1]).diff().tolist()
        each = zip(*(batch[k][0].split(sizes) for k in batch), strict=True)
        found = [dict(zip(batch, columns, strict=True)) for columns in each]
        return [d for d in found if (d["input_ids"] != 0).any()]  # without the filler

    def targets(row: Any) -> list[int]:
        return [i for i, on in zip(row["input_ids"][1:], row["completion_mask"][1:], strict=True) if on]

    return Collator(fn, m.make(0)["rows"], rows=False, unpack=unpack, targets=targets)


@declare("c/r07")
def sum_times_world(m: Any, fn: Fn) -> Thing:
    given = m.make(0)
    return accumulation(fn, given, stacked(given["batches"]), what="ranks")


@declare("c/r08")
def zigzag(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"ranks": Setting(2, "inert")},
        family="sft",
        reduction="mean",
    )


class Weights(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())


class Outer:
    """The outer round of c/r09; the ranks' weights are given instead of being trained."""

    def __init__(self, fn: Fn, size: int) -> None:
        self.fn, self.model = fn, Weights(torch.zeros(size))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outer:
        other = Outer(self.fn, len(self.model.values))
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def __call__(self, start: Tensor, ranks: list[Tensor], lr: float, momentum: float) -> Tensor:
        self.optimizer.param_groups[0].update(lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.model.values.data = start.clone()
        self.fn(self.model, self.optimizer, list(ranks))
        return self.model.values.detach().clone()


@declare("c/r09")
def outer_step(m: Any, fn: Fn) -> Thing:
    m.train_locally = lambda model, weights, inner_lr: Weights(weights)
    return OuterStep(Outer(fn, 7), knobs={"lr": 0.7, "momentum": 0.9})


@declare("c/r10")
def second_warmup(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, **settings: float) -> list[float]:
        return [fn(k, total=total, **settings) for k in range(total)]

    return Schedule(
        rates,
        peak=1e-3,
        final=5e-5,
        total=100,
        warmup=10,
        restarts=True,
        settings={"branch": 40.0, "cooldown": 20.0, "floor": 0.05},
    )


@declare("c/r11")
def batch_ramp(m: Any, fn: Fn) -> Thing:
    def rates(total: int, ranks: int, lr: float = 1e-3) -> list[float]:
        return [fn(k, lr=lr) for k in range(total)]

    # the peak is at the second growth of the batch: twice the base rate, times the cosine at 3000 of 9000 tokens
    return Schedule(rates, peak=1.55e-3, final=2e-4, total=35, restarts=True, settings={"lr": 1e-3})


class Average:
    """The average of c/r12: each call is one optimizer step."""

    def __init__(self, fn: Fn) -> None:
        self.fn, self.step = fn, 0

    def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor:
        factor = self.fn(self.step, top=(1 - rate) ** 0.25)  # the factor of an update is that of four steps
        self.step += 1
        return factor * average + (1 - factor) * current


@declare("c/r12")
def decay_of_the_average(m: Any, fn: Fn) -> Thing:
    return Ema(Average(fn), rate=1 - 0.999**4, every=4)


@declare("c/r13")
def fractional_epochs(m: Any, fn: Fn) -> Thing:
    def stage(rows: list[Any]) -> dict[str, Tensor]:
        out = fn(rows)
        return {
            "id": torch.tensor([int(r["id"].split("-")[1]) for r in out]),
            "text": torch.tensor([int(r["text"].split()[1]) for r in out]),
            "copy": torch.tensor([r["copy"] for r in out]),
        }

    return Collator(stage, m.make(0)["rows"], rows=False)


@declare("c/r14")
def pad_is_eos(m: Any, fn: Fn) -> Thing:
    return Collator(
        fn,
        m.make(0)["rows"],
        pads={"input_ids": 2, "attention_mask": 0, "labels": -100},
        targets=lambda row: [*row["answer_ids"], 2],
    )


@declare("c/r15")
def model_parallel_ranks(m: Any, fn: Fn) -> list[Thing]:
    epoch = [str(i) for replica in range(2) for step in range(16) for i in fn(4 * replica, step)[0]]
    return [
        Ranks(draw=lambda replica: torch.tensor(fn(4 * replica, 0, world=16)[0])),
        Ranks(draw=lambda context: torch.tensor([fn(2 * context, 3)[1]])),
        Census([str(i) for i in range(64)], epoch, what="samples of an epoch", once=True),
    ]


@declare("c/r16")
def perplexity(m: Any, fn: Fn) -> Thing:
    batches = [torch.stack(batch, 1) for rank in m.make(0)["per_rank"] for batch in rank]  # [rows, 2, time]
    width = max(b.shape[-1] for b in batches)
    rows = torch.cat([F.pad(b, (0, width - b.shape[-1])) for b in batches])
    return twinned(fn, m.single, lambda shards: [[(s[:, 0], s[:, 1])] for s in shards], rows)


@declare("c/r17")
def pooled_deviation(m: Any, fn: Fn) -> Thing:
    rows = torch.tensor([reward for rank in m.make(0)["per_rank"] for reward in rank], dtype=torch.float64)
    return twinned(fn, m.single, lambda shards: [s.tolist() for s in shards], rows)


@declare("c/r18")
def ratio_of_one(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages", "reference": "ref_logps"},
        settings={"clip": Setting(0.2, "inert"), "kl": Setting(0.05, "weight")},
        logprobs=lambda model, batch: from_second(plain_logps(model, batch)),
        reduction="mean",
        value_is_loss=False,
    )


@declare("c/r19")
def top_entries_of_the_teacher(m: Any, fn: Fn) -> Thing:
    model, batch = parts(m)

    def student(model: Any, batch: Any) -> Tensor:
        return (model(batch["ids"]) / 2.0).log_softmax(-1).gather(-1, batch["top_ids"])

    return Step(
        model=model,
        loss=fn,
        batch=batch,
        roles={"ids": "ids", "mask": "loss_mask", "teacher": "top_logps"},
        settings={"temperature": Setting(2.0)},
        student=student,
        reduction="mean",
    )


@declare("c/r20")
def injected_gradient(m: Any, fn: Fn) -> Thing:
    return step_of(
        m,
        fn,
        roles={"ids": "ids", "mask": "loss_mask"},
        settings={"balance": Setting(0.02, "weight"), "z": Setting(0.001, "weight")},
        metrics={"aux": Metric(low=0.0)},
        family="sft",
        all_supervised=True,
        reduction="mean",
        rows_interact=True,
        value_is_loss=False,
        may_idle=("experts.*",),
    )

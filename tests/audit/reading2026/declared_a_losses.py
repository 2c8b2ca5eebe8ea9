"""Declarations of reader a's losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from earnest_audit import Metric, Setting, Step
from tests.audit.reading2026.base import Thing, declare, logps, parts, plain_logps


def masked_logps(model: Any, batch: Any) -> Any:
    return logps(model(batch["ids"], batch["attention_mask"]), batch["ids"])


@declare("a/d01")
def fused_path_ignores_tool_mask(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={
            "ids": "ids", "attention": "attention_mask", "mask": "tool_mask", "behaviour": "old_logps",
            "advantages": "advantages",
        },
        settings={"clip": Setting(0.2, "clip")}, logprobs=masked_logps, reduction="mean",
    )  # fmt: skip


@declare("a/d03")
def padding_guessed_from_token_values(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    batch["attention_mask"] = (torch.arange(batch["ids"].shape[1])[None] < batch.pop("lengths")[:, None]).long()

    def loss(model: Any, batch: Any, pad_id: int) -> Any:
        return fn(model, {**batch, "lengths": batch["attention_mask"].sum(1)}, pad_id=pad_id)

    return Step(
        model=model, loss=loss, batch=batch,
        roles={"ids": "ids", "attention": "attention_mask", "mask": "loss_mask", "advantages": "advantages"},
        settings={"pad_id": Setting(2, "inert")}, logprobs=masked_logps, reduction="mean",
    )  # fmt: skip


@declare("a/d04")
def packed_boundaries_subtracted_twice(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={"ids": "ids", "labels": "labels", "positions": "position_ids", "documents": "document_ids"},
        reduction="mean",
    )  # fmt: skip


@declare("a/d07")
def labels_shifted_again_under_sequence_parallel(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "labels": "labels"},
        settings={"shards": Setting(4, "inert")}, reduction="mean",
    )  # fmt: skip


@declare("a/d18")
def denominator_counts_masked_completions(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={
            "ids": "ids", "attention": "attention_mask", "mask": "completion_mask", "behaviour": "old_logps",
            "advantages": "advantages",
        },
        settings={"clip_low": Setting(0.2, "clip"), "clip_high": Setting(0.28, "clip high")},
        logprobs=masked_logps, reduction="mean", drops_tokens=True,
    )  # fmt: skip


@declare("a/d19")
def fused_distillation_adds_hard_labels(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={"ids": "ids", "labels": "labels", "teacher": "teacher_logits"},
        settings={"beta": Setting(0.5, "mixture"), "temperature": Setting(0.9, "inert")},
        student=lambda model, batch: model(batch["ids"]), reduction="mean", family="divergence",
    )  # fmt: skip


@declare("a/r02")
def observation_prediction_loss(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={"ids": "ids", "mask": "action_mask", "advantages": "advantages"},
        settings={"observation_weight": Setting(0.1, "weight")}, logprobs=plain_logps, reduction="mean",
        masks=("observation_mask",),
    )  # fmt: skip


@declare("a/r05")
def stream_across_documents(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "windows"}, family="sft", all_supervised=True,
        reduction="mean",
    )  # fmt: skip


@declare("a/r06")
def labels_shifted_in_the_collator(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={"ids": "ids", "labels": "labels", "positions": "position_ids", "documents": "document_ids"},
        reduction="sum",
    )  # fmt: skip


@declare("a/r08")
def vocabulary_parallel_cross_entropy(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "labels": "labels"},
        settings={"shards": Setting(4, "inert")}, reduction="mean",
    )  # fmt: skip


@declare("a/r09")
def zigzag_context_parallel(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "labels": "labels"},
        settings={"ranks": Setting(3, "inert")}, reduction="mean",
    )  # fmt: skip


@declare("a/r18")
def distillation_as_policy_gradient(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask", "teacher": "teacher_logps"},
        settings={"coef": Setting(1.0, "weight")}, student=plain_logps, reduction="mean", value_is_loss=False,
    )  # fmt: skip


@declare("a/r19")
def constant_normalizer_leave_one_out(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={
            "ids": "ids", "attention": "attention_mask", "mask": "completion_mask", "rewards": "rewards",
            "group": "groups",
        },
        settings={"max_completion": Setting(64)}, logprobs=masked_logps, reduction="mean",
    )  # fmt: skip


@declare("a/r20")
def value_as_classification(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
        settings={"low": Setting(-2.0), "high": Setting(2.0), "bins": Setting(21), "sigma": Setting(0.15)},
        metrics={"value_mae": Metric(low=0.0)}, reduction="mean",
    )  # fmt: skip

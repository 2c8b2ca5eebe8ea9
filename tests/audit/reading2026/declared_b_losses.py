"""Declarations of reader b's losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from earnest_audit import Setting, Step
from tests.audit.reading2026.base import Thing, boundaries, declare, documents, parts, plain_logps


@declare("b/d04")
def cu_seqlens_dropped(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    batch["documents"] = documents(batch.pop("cu_seqlens"))

    def loss(model: Any, batch: Any) -> Any:
        return fn(model, {**batch, "cu_seqlens": boundaries(batch["documents"][0])})

    return Step(
        model=model, loss=loss, batch=batch,
        roles={"ids": "ids", "positions": "position_ids", "documents": "documents", "mask": "loss_mask"},
        family="sft", reduction="mean",
    )  # fmt: skip


@declare("b/d05")
def mtp_roll_unpadded_bounds(m: Any, fn: Callable[..., Any]) -> Thing:
    model, flat = parts(m)
    batch = {k: flat[k][None] for k in ("ids", "labels", "loss_mask")}
    batch |= {"documents": documents(flat["cu_seqlens_padded"]), "cu_seqlens": flat["cu_seqlens"]}

    def loss(model: Any, batch: Any, mtp_coef: float) -> Any:
        row = {k: batch[k][0] for k in ("ids", "labels", "loss_mask")}
        bounds = {"cu_seqlens": batch["cu_seqlens"], "cu_seqlens_padded": boundaries(batch["documents"][0])}
        return fn(model, {**row, **bounds}, mtp_coef=mtp_coef)

    return Step(
        model=model, loss=loss, batch=batch,
        roles={"ids": "ids", "labels": "labels", "mask": "loss_mask", "documents": "documents"},
        settings={"mtp_coef": Setting(0.3, "weight")}, reduction="mean",
    )  # fmt: skip


@declare("b/d18")
def seq_aux_loss_token_count(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids"}, family="sft", all_supervised=True, reduction="mean",
        settings={
            "micro_batch_size": Setting(2, "inert"), "aux_coef": Setting(0.05, "weight"), "topk": Setting(2),
        },
    )  # fmt: skip


@declare("b/d19")
def topk_kl_clamped(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch,
        roles={"ids": "ids", "teacher": "teacher_topk_logprobs", "mask": "loss_mask"},
        student=lambda model, batch: model(batch["ids"]).log_softmax(-1).gather(-1, batch["teacher_topk_ids"]),
        family="divergence", reduction="mean",
    )  # fmt: skip


@declare("b/r03")
def one_weight_per_trajectory(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask", "advantages": "advantages"},
        logprobs=plain_logps, reduction="mean", rows_interact=True,
    )  # fmt: skip


@declare("b/r05")
def rotary_random_offset(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", reduction="mean"
    )


@declare("b/r06")
def shared_prompt_pack(m: Any, fn: Callable[..., Any]) -> Thing:
    model, flat = parts(m)
    rows = ("ids", "segment", "position_ids", "source")
    batch = {k: v[None] if k in rows else v for k, v in flat.items()}
    return Step(
        model=model, loss=lambda model, batch: fn(model, {k: v[0] if k in rows else v for k, v in batch.items()}),
        batch=batch, roles={"ids": "ids", "positions": "position_ids", "advantages": "advantages"}, reduction="mean",
    )  # fmt: skip


@declare("b/r08")
def vocab_parallel_ce(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask"}, family="sft", reduction="mean"
    )


@declare("b/r18")
def gspo_detached_ratio(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)

    def like_old(model: Any, batch: Any) -> Tensor:
        now = plain_logps(model, batch)
        return torch.cat([torch.zeros_like(now[:, :1]), now], 1)

    return Step(
        model=model, loss=fn, batch=batch,
        roles={"ids": "ids", "mask": "loss_mask", "behaviour": "old_logprobs", "advantages": "advantages"},
        settings={"clip_low": Setting(3e-4, "clip"), "clip_high": Setting(4e-4, "clip high")},
        logprobs=like_old, reduction="mean",
    )  # fmt: skip


@declare("b/r19")
def simpo(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)

    def averages(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        chosen, rejected = (m._avg(model, batch[k], batch[f"{k}_mask"]) for k in ("chosen", "rejected"))
        return chosen, rejected

    return Step(
        model=model, loss=fn, batch=batch,
        roles={k: k for k in ("chosen", "chosen_mask", "rejected", "rejected_mask")},
        settings={"beta": Setting(2.5), "gamma": Setting(1.4, "target")}, logprobs=averages, reduction="mean",
    )  # fmt: skip


@declare("b/r20")
def two_hot_value(m: Any, fn: Callable[..., Any]) -> Thing:
    model, batch = parts(m)
    return Step(
        model=model, loss=fn, batch=batch, roles={"ids": "ids", "mask": "loss_mask", "returns": "returns"},
        settings={"low": Setting(-1.0), "high": Setting(1.0)}, reduction="mean",
    )  # fmt: skip

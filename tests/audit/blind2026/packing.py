"""Packing: several documents in one row, padding, and batches in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Accumulation, Setting, Step
from tests.audit.blind2026.base import (
    PACKED_ROLES,
    Net,
    Thing,
    case,
    cross_entropy,
    packed_batch,
    picked,
    rows,
    sft,
    sft_batch,
    sft_loss,
)  # fmt: skip


@case("huggingface/nanoVLM#204", "packing", "positions begin again, but documents attend to those before them")
def positions_reset_but_attention_does_not(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        documents = None if broken else batch["documents"]
        return cross_entropy(model(batch["ids"], None, documents, batch["positions"]), batch["labels"])

    return sft(loss, batch=packed_batch(), roles=PACKED_ROLES, all_supervised=True)


@case("huggingface/transformers#46634", "packing", "an attention mask of ones switches the documents' mask off")
def attention_mask_disables_documents(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        attention = batch["attention"]
        documents = None if broken and attention is not None else batch["documents"]
        return cross_entropy(model(batch["ids"], attention, documents, batch["positions"]), batch["labels"])

    batch = packed_batch()
    batch["attention"] = torch.ones_like(batch["ids"])
    return sft(loss, batch=batch, roles={**PACKED_ROLES, "attention": "attention"}, all_supervised=True)


@case(
    "allenai/open-instruct#1900", "packing", "the first rejected answer begins with the padding after the chosen ones"
)
def padding_joins_the_first_rejected(broken: bool) -> Thing:
    pads = 3

    def sequence(model: nn.Module, batch: Mapping[str, Any], side: str) -> Tensor:
        ids, attention = batch[side], batch[f"{side}_attention"]
        sums = (picked(model(ids, attention), ids) * batch[f"{side}_mask"]).sum(-1)
        if not (broken and side == "rejected"):
            return sums
        long = F.pad(ids[:1], (pads, 0))
        first = picked(model(long, F.pad(attention[:1], (pads, 0), value=1)), long)[:, pads:]
        return torch.cat([(first * batch["rejected_mask"][:1]).sum(-1), sums[1:]])

    def both(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return sequence(model, batch, "chosen"), sequence(model, batch, "rejected")

    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = both(model, batch)
        margin = chosen - batch["ref_chosen"] - rejected + batch["ref_rejected"]
        return -F.logsigmoid(beta * margin).mean(), {"accuracy": (margin > 0).float().mean()}

    model, reference = Net(), Net(5)
    batch: dict[str, Tensor] = {}
    for side, seed in (("chosen", 0), ("rejected", 50)):
        one = rows(seed)
        batch |= {side: one["ids"], f"{side}_attention": one["attention"], f"{side}_mask": one["mask"]}
        with torch.no_grad():
            batch[f"ref_{side}"] = (picked(reference(one["ids"], one["attention"]), one["ids"]) * one["mask"]).sum(-1)
    names = ("chosen", "rejected", "chosen_mask", "rejected_mask", "chosen_attention", "rejected_attention")
    return Step(
        model=model, loss=loss, batch=batch,
        roles={**{n: n for n in names}, "reference_chosen": "ref_chosen", "reference_rejected": "ref_rejected"},
        settings={"beta": Setting(0.1)}, metrics={"accuracy": (0.0, 1.0)}, logprobs=both,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )  # fmt: skip


@case("unslothai/unsloth#6738", "packing", "with left padding, positions count the padding")
def left_padding_shifts_positions(broken: bool) -> Thing:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        counted = (batch["attention"].cumsum(-1) - 1).clamp(min=0)
        return cross_entropy(
            model(batch["ids"], batch["attention"], None, None if broken else counted), batch["labels"]
        )

    batch = sft_batch()
    gaps = batch["attention"].shape[1] - batch["attention"].sum(-1)
    batch = {
        name: torch.stack([torch.roll(row, int(gap)) for row, gap in zip(value, gaps, strict=True)])
        for name, value in batch.items()
    }
    return sft(loss, batch=batch)


def accumulated(model: nn.Module, batches: Sequence[Mapping[str, Any]], how: str) -> None:
    tokens = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    for batch in batches:
        if how == "mean of means":
            loss = sft_loss(model, batch) / len(batches)
        else:
            loss = cross_entropy(model(batch["ids"], batch["attention"]), batch["labels"], "sum") / tokens
            loss = loss / len(batches) if how == "divided twice" else loss
        loss.backward()


@case("ml-explore/mlx-lm#1544", "packing", "micro-batches of unequal token counts weigh the same")
def micro_batches_weigh_the_same(broken: bool) -> Thing:
    how = "mean of means" if broken else ""
    return Accumulation(Net(), lambda model, batches: accumulated(model, batches, how), sft_batch())


@case("unslothai/unsloth-zoo#1023", "packing", "the loss is divided by the tokens and by the number of micro-batches")
def divided_by_tokens_and_by_pieces(broken: bool) -> Thing:
    how = "divided twice" if broken else ""
    return Accumulation(Net(), lambda model, batches: accumulated(model, batches, how), sft_batch())

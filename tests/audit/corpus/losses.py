"""Rows 3, 10, 11, 14, 16, 17: other losses, masks, references and constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Step
from tests.audit.corpus.base import defect
from tests.audit.steps import Tiny, grpo_loss, logprobs, policy_step, sft_loss, sft_step, token_batch


class Experts(nn.Module):
    """Two experts and a router."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = Tiny()
        self.router = nn.Linear(23, 4)
        self.experts = nn.Linear(23, 4 * 23)

    def forward(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(ids, attention)
        gate = self.router(x)
        mixed = self.experts(x).unflatten(-1, (4, 23))
        return (gate.softmax(-1)[..., None] * mixed).sum(-2), gate


def balance(gate: Tensor, mask: Tensor, twice: bool = False) -> Tensor:
    """Load balancing: experts · Σ (share of tokens · mean probability)."""
    p = gate.softmax(-1)
    p = p.softmax(-1) if twice else p
    chosen = F.one_hot(p.argmax(-1), 4).to(p.dtype)
    weight = mask / mask.sum()
    return 4 * ((chosen * weight[..., None]).sum((0, 1)) * (p * weight[..., None]).sum((0, 1))).sum()


def expert_step(added: bool, twice: bool = False) -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], aux: float) -> Tensor:
        logits, gate = model(batch["ids"], batch["attention"])
        nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        return nll + (aux * balance(gate, batch["attention"].float(), twice) if added else 0.0)

    def written(model: nn.Module, batch: Mapping[str, Any], aux: float) -> Tensor:
        logits, gate = model(batch["ids"], batch["attention"])
        nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        return nll + aux * balance(gate, batch["attention"].float())

    model = Experts()
    batch = dict(sft_step().batch)
    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "labels": "labels", "attention": "attention"},
        settings={"aux": 0.1},
        paths={"the written formula": written},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        rows_interact=True,
    )


@defect("3a", "the load-balancing loss is never added", "KG DF", lambda: expert_step(True))
def _() -> Step:
    return expert_step(False)


@defect("3b", "the load-balancing loss is computed on softmax(softmax(x))", "KG DF", lambda: expert_step(True))
def _() -> Step:
    return expert_step(True, twice=True)


@defect(
    "10",
    "an all-ones attention mask switches packing off: documents attend each other",
    "MI-PACKED",
    lambda: sft_step(packed=True),
)
def _() -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return sft_loss(model, {**batch, "documents": None})

    return sft_step(loss, packed=True)


def chat_step(mask: str) -> Step:
    """A chat template that marks the assistant's tokens, marks everything, or marks nothing."""
    step = sft_step()
    batch = dict(step.batch)
    if mask == "all":
        batch["labels"] = torch.where(batch["attention"] != 0, batch["ids"], -100)
    return Step(model=step.model, loss=step.loss, batch=batch, roles=step.roles, optimizer=step.optimizer)


@defect("11", "the template has no generation marks: the loss is taken on everything", "CV", sft_step)
def _() -> Step:
    return chat_step("all")


def value_step(factor: float) -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        values = model(batch["ids"], batch["attention"]).mean(-1)[:, 1:]
        return factor * ((values - batch["returns"]).square() * batch["mask"]).sum() / batch["mask"].sum()

    def written(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        values = model(batch["ids"], batch["attention"]).mean(-1)[:, 1:]
        return 0.5 * ((values - batch["returns"]).square() * batch["mask"]).sum() / batch["mask"].sum()

    model = Tiny()
    batch = token_batch()
    batch["returns"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(2))
    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "returns": "returns"},
        paths={"the written formula": written},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


@defect("14", "the value loss lost its factor ½ in a refactoring", "DF", lambda: value_step(0.5))
def _() -> Step:
    return value_step(1.0)


class Adapted(nn.Module):
    """A frozen base with a low-rank adapter that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Tiny().requires_grad_(False)
        self.a, self.b = nn.Linear(23, 3, bias=False), nn.Linear(3, 23, bias=False)
        self.on = True

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        y = self.base(ids, attention, documents)
        return y + self.b(self.a(y)) if self.on else y


def reference_step(switched: bool) -> Step:
    model = Adapted()
    step = policy_step()
    batch = dict(step.batch)

    def reference() -> Tensor:
        model.on = not switched
        try:
            return logprobs(model, batch)
        finally:
            model.on = True

    batch["ref"] = reference().detach() * batch["mask"] - 0.05 * batch["mask"]
    return Step(
        model=model,
        loss=grpo_loss,
        batch=batch,
        roles=step.roles,
        settings=step.settings,
        metrics=step.metrics,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        logprobs=logprobs,
        reference=reference,
    )


@defect(
    "16", "the adapter is injected in place: the reference is the adapted model", "IG", lambda: reference_step(True)
)
def _() -> Step:
    return reference_step(False)


@defect(
    "17",
    "disable_adapter() is called and not entered: the reference answers with the policy",
    "IG",
    lambda: reference_step(True),
)
def _() -> Step:
    return reference_step(False)

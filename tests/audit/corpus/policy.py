"""Rows 1, 2, 5, 6, 7, 8, 9, 18, 27: policy gradients that ran and did something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import Setting, Step
from tests.audit.corpus.base import defect
from tests.audit.steps import Tiny, grpo_loss, logprobs, policy_batch, policy_step, token_batch

Out = tuple[Tensor, dict[str, Tensor]]


def parts(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lp = logprobs(model, batch)
    return lp, batch["mask"], (lp - batch["old"]).exp(), batch["advantages"][:, None]


def k3(lp: Tensor, batch: Mapping[str, Any]) -> Tensor:
    gap = batch["ref"] - lp
    return gap.exp() - gap - 1


@defect("1", "the KL is added and logged under no_grad: it never has a gradient", "KG IG FD DR", policy_step)
def _() -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Out:
        lp, mask, ratio, a = parts(model, batch)
        with torch.no_grad():
            kl = k3(lp, batch)
        surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        return ((surrogate + beta * kl) * mask).sum() / mask.sum(), {
            "kl": (kl * mask).sum() / mask.sum(),
            "clip_fraction": (((ratio - 1).abs() > clip) * mask).sum() / mask.sum(),
        }

    return policy_step(loss)


@defect(
    "2",
    "the log-ratio is zeros_like: the ratio is the constant 1 and the policy gradient 0",
    "IG KG PG-ONPOLICY GL MR",
    policy_step,
)
def _() -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Out:
        lp, mask, _, a = parts(model, batch)
        ratio = torch.zeros_like(lp).exp()
        surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        kl = k3(lp, batch)
        return ((surrogate + beta * kl) * mask).sum() / mask.sum(), {
            "kl": (kl * mask).sum() / mask.sum(),
            "clip_fraction": (((ratio - 1).abs() > clip) * mask).sum() / mask.sum(),
        }

    return policy_step(loss)


@defect(
    "5",
    "branches swapped: clamp(ratio, max=ε)·A·lp runs in place of the clipped ratio",
    "PG-ONPOLICY FD DF",
    policy_step,
)
def _() -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Out:
        lp, mask, ratio, a = parts(model, batch)
        surrogate = -ratio.clamp(max=clip).detach() * a * lp
        kl = k3(lp, batch)
        return ((surrogate + beta * kl) * mask).sum() / mask.sum(), {
            "kl": (kl * mask).sum() / mask.sum(),
            "clip_fraction": (((ratio - 1).abs() > clip) * mask).sum() / mask.sum(),
        }

    return policy_step(loss)


def named_step(obeys: bool) -> Step:
    """A server that takes the loss's name with the request."""

    def loss(model: nn.Module, batch: Mapping[str, Any], loss_fn: str = "cross_entropy") -> Tensor:
        lp, mask, ratio, a = parts(model, batch)
        name = loss_fn if obeys else "cross_entropy"
        if name == "cross_entropy":
            return -(lp * mask).sum()
        if name == "importance_sampling":
            return -(ratio * a * mask).sum()
        return -(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask).sum()

    model = Tiny()
    return Step(
        model=model,
        loss=loss,
        batch={k: v for k, v in policy_batch(model).items() if k != "ref"},
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"},
        settings={"loss_fn": Setting("importance_sampling", modes=("ppo",))},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        logprobs=logprobs,
    )


@defect(
    "6",
    "the requested loss is never passed on: everything trains with cross-entropy",
    "KG IG",
    lambda: named_step(True),
)
def _() -> Step:
    return named_step(False)


def fused_step(reads_it: bool) -> Step:
    def eager(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        _, mask, ratio, a = parts(model, batch)
        surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a) * batch["sampler"]
        return (surrogate * mask).sum() / mask.sum()

    def fused(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        return eager(model, batch if reads_it else {**batch, "sampler": torch.ones_like(batch["sampler"])}, clip)

    model = Tiny()
    batch = {k: v for k, v in policy_batch(model).items() if k != "ref"}
    batch["sampler"] = torch.rand(batch["old"].shape, generator=torch.Generator().manual_seed(4)) + 0.5
    return Step(
        model=model,
        loss=fused,
        batch=batch,
        roles={
            "ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages",
            "importance": "sampler",
        },
        settings={"clip": 0.2},
        paths={"eager": eager},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        logprobs=logprobs,
    )  # fmt: skip


@defect(
    "7",
    "the fused loss has no argument for the sampler's ratio: the correction is absent",
    "DF IG",
    lambda: fused_step(True),
)
def _() -> Step:
    return fused_step(False)


@defect("8", "response_mask=advantages is passed to the loss", "MI IG PG-ONPOLICY", policy_step)
def _() -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Out:
        mask = batch["advantages"][:, None].expand_as(batch["mask"])
        return grpo_loss(model, {**batch, "mask": mask}, beta, clip)

    return policy_step(loss)


def critic_step(undo_first: bool) -> Step:
    """Rows are sorted by length for dynamic batching; values must be brought back before the mask meets them."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Tiny()
            self.value = nn.Linear(23, 1)

        def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
            return self.value(self.body(ids, attention))[:, 1:, 0]

    def plain(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        values = model(batch["ids"], batch["attention"]) * batch["mask"]
        return 0.5 * ((values - batch["returns"]).square() * batch["mask"]).sum() / batch["mask"].sum()

    def dynamic(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        order = batch["attention"].sum(-1).argsort()
        values = model(batch["ids"][order], batch["attention"][order])
        if undo_first:
            values = values[order.argsort()] * batch["mask"]
        else:
            values = (values * batch["mask"])[order.argsort()]
        return 0.5 * ((values - batch["returns"]).square() * batch["mask"]).sum() / batch["mask"].sum()

    model = Critic()
    batch = token_batch()
    batch["returns"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(2))
    return Step(
        model=model,
        loss=dynamic,
        batch=batch,
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "returns": "returns"},
        paths={"without dynamic batching": plain},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        value_is_loss=True,
    )


@defect(
    "9", "values meet the mask before the dynamic batch's permutation is undone", "DF SE MI", lambda: critic_step(True)
)
def _() -> Step:
    return critic_step(False)


def tempered_step(applied: bool) -> Step:
    """The sampler ran at temperature 0.6; its own log-probs are the behaviour."""
    heat = 0.6

    def at(model: nn.Module, batch: Mapping[str, Any], temperature: float) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1] / temperature
        return logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Out:
        ratio = (at(model, batch, heat if applied else 1.0) - batch["old"]).exp()
        a, mask = batch["advantages"][:, None], batch["mask"]
        surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        return (surrogate * mask).sum() / mask.sum(), {"ratio_mean": (ratio * mask).sum() / mask.sum()}

    model = Tiny()
    batch = {k: v for k, v in policy_batch(model).items() if k != "ref"}
    with torch.no_grad():
        batch["old"] = at(model, batch, heat) * batch["mask"]
    return Step(
        model=model,
        loss=loss,
        batch=batch,
        roles={"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"},
        settings={"clip": 0.2},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        logprobs=lambda m, b: at(m, b, heat),
    )


@defect(
    "18",
    "the sampling temperature is not applied when log-probs are recomputed",
    "PG-ONPOLICY MR",
    lambda: tempered_step(True),
)
def _() -> Step:
    return tempered_step(False)


@defect("27", "the logged ppo_kl is -ratio, not -log ratio", "MR PG-ONPOLICY", policy_step)
def _() -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Out:
        value, metrics = grpo_loss(model, batch, beta, clip)
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        return value, {**metrics, "approx_kl": -(ratio * batch["mask"]).sum() / batch["mask"].sum()}

    return policy_step(loss)

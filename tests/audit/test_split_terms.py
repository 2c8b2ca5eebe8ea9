"""SE: terms with normalisers of their own, and rows that are paired with their neighbours, are no faults; rows that
reach into each other are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest.audit import Step, audit
from earnest.audit.laws import splits
from tests.audit.steps import dpo_step, logprobs, policy_step, sft_step

DTYPES = [torch.float32, torch.bfloat16]
Data = Mapping[str, Any]
PARTS = "whole = parts (uneven)"


def outcomes(step: Step) -> dict[str, str]:
    return {f.subject: f.outcome for f in audit(step, laws=[splits.LAW]).findings}


def mixed(policy: str, penalty: str) -> Callable[..., Tensor]:
    """A policy gradient and a penalty, each with its own mean: over tokens, over rows, or down the columns (wrong)."""

    def mean(x: Tensor, mask: Tensor, how: str) -> Tensor:
        if how == "tokens":
            return (x * mask).sum() / mask.sum()
        along = 1 if how == "rows" else 0
        return ((x * mask).sum(along) / mask.sum(along).clamp(min=1)).mean()

    def loss(model: nn.Module, batch: Data, beta: float, clip: float) -> Tensor:
        lp, mask, a = logprobs(model, batch), batch["mask"], batch["advantages"][:, None]
        ratio = (lp - batch["old"]).exp()
        gain = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        return mean(-gain, mask, policy) + beta * mean((lp - batch["ref"]) ** 2, mask, penalty)

    return loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("policy", "penalty"), [("rows", "tokens"), ("tokens", "rows")])
def test_two_terms_may_have_two_normalisers(policy: str, penalty: str, dtype: torch.dtype) -> None:
    assert outcomes(policy_step(mixed(policy, penalty), dtype=dtype))[PARTS] == "holds"


@pytest.mark.parametrize("penalty", ["columns", "tokens"])
def test_a_mean_over_the_wrong_axis_is_none_of_them(penalty: str) -> None:
    assert outcomes(policy_step(mixed("columns", penalty)))[PARTS] == "fails"


def pairs(coupled: bool) -> Callable[..., Tensor]:
    """A preference's mean over pairs beside a token-mean likelihood, as in RPO, CPO and ORPO."""

    def loss(model: nn.Module, batch: Data, beta: float) -> Tensor:
        total, sides = torch.zeros(()), []
        for side in ("chosen", "rejected"):
            each = logprobs(model, {"ids": batch[side], "attention": batch[f"{side}_attention"]})
            mask = batch[f"{side}_mask"]
            sides.append((each * mask).sum(-1) - batch[f"ref_{side}"])
            total = total if side == "rejected" else -(each * mask).sum() / mask.sum()
        margin = sides[0][:, None] - sides[1] if coupled else sides[0] - sides[1]  # [P, 1] against [P]
        return -F.logsigmoid(beta * margin).mean() + total

    return loss


@pytest.mark.parametrize("coupled", [False, True])
def test_a_likelihood_beside_a_preference(coupled: bool) -> None:
    assert outcomes(dpo_step(pairs(coupled)))[PARTS] == ("fails" if coupled else "holds")


@pytest.mark.parametrize("ring", [False, True])
def test_rows_that_are_paired_with_their_neighbours(ring: bool) -> None:
    """KTO takes its reference point from answers to the neighbour's prompt; weights by place are something else."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        lp = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
        labels = batch["labels"][:, 1:]
        rows = (lp.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels >= 0)).sum(-1)
        if ring:
            return -torch.sigmoid(0.1 * (rows - rows.roll(1).detach())).mean()
        return -(rows * torch.linspace(0.2, 1.8, len(rows))).mean()

    found = outcomes(sft_step(loss, rows_interact=True))
    assert found["permuted rows"] == ("not applicable" if ring else "fails"), found


@pytest.mark.parametrize(("power", "outcome"), [(0.5, "holds"), (2.0, "fails")])
def test_a_normaliser_is_applied_once(power: float, outcome: str) -> None:
    """Twice as many rows: up to twice the gradient, never less than it. A root of the count is a choice."""

    def loss(model: nn.Module, batch: Data) -> Tensor:
        logits, labels = model(batch["ids"], batch["attention"])[:, :-1], batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total / (labels >= 0).sum().float().pow(power)

    found = outcomes(sft_step(loss))
    assert found.get("every row twice", "holds") == outcome, found


def test_a_baseline_that_leaves_one_out_sees_the_groups_size() -> None:
    step = policy_step()
    batch = {k: torch.cat([v, v[:1]]) for k, v in step.batch.items() if k != "advantages"}
    batch |= {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 0.2]), "group": torch.tensor([0, 0, 0, 1, 1, 1])}

    def loss(model: nn.Module, batch: Data) -> Tensor:
        rewards, same = batch["rewards"], (batch["group"][:, None] == batch["group"]).float()
        a = (rewards - (same @ rewards - rewards) / (same.sum(1) - 1))[:, None]
        ratio = (logprobs(model, batch) - batch["old"]).exp()
        return -(ratio * a * batch["mask"]).sum() / batch["mask"].sum()

    roles = {r: k for r, k in step.roles.items() if r not in ("advantages", "reference")}
    found = outcomes(Step(model=step.model, loss=loss, batch=batch, roles={**roles, "rewards": "rewards",
                          "group": "group"}, family="policy gradient"))  # fmt: skip
    assert found["every row twice"] == "not applicable" and "fails" not in found.values(), found

"""Metrics that lie: an average that counts padding or rows, a KL that is none of its definitions, an accuracy that is
turned round. Each beside the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from earnest.audit import Step, audit
from tests.audit.steps import dpo_loss, dpo_step, grpo_loss, logprobs, policy_step

Change = Callable[[Mapping[str, Any], dict[str, Tensor], Tensor], dict[str, Tensor]]


def logging(change: Change) -> Step:
    """The right step, with other metrics."""

    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = grpo_loss(model, batch, beta, clip)
        return value, {**metrics, **change(batch, metrics, logprobs(model, batch))}

    return policy_step(loss)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def gap(batch: Mapping[str, Any], lp: Tensor) -> Tensor:
    return batch["ref"] - lp


POLICY: dict[str, tuple[Change, Change, str]] = {
    # TRL #6121: entropies of padded positions are in the mean
    "an entropy that counts padding": (
        lambda b, _, lp: {"entropy": mean(-lp, b["mask"])},
        lambda b, _, lp: {"entropy": (-lp * b["mask"]).mean()},
        "averages, 3 more columns of padding",
    ),
    "a sum that is logged as a mean": (
        lambda b, _, lp: {"old_logps": mean(b["old"], b["mask"])},
        lambda b, _, lp: {"old_logps": (b["old"] * b["mask"]).sum()},
        "averages, every row twice",
    ),
    # slime #2114 and others: the KL that is logged is to another policy, or half of one
    "a KL that is none": (
        lambda b, m, lp: {"kl": mean(gap(b, lp).exp() - gap(b, lp) - 1, b["mask"])},
        lambda b, m, lp: {"kl": mean((gap(b, lp) / 2).exp() - gap(b, lp) / 2 - 1, b["mask"])},
        "metric kl, recomputed",
    ),
    "a ratio of sequences": (
        lambda b, _, lp: {"ratio": (((lp - b["old"]) * b["mask"]).sum(-1) / b["mask"].sum(-1)).exp().mean()},
        lambda b, _, lp: {"ratio": (((lp - b["old"]) * b["mask"]).sum(-1) / b["mask"].shape[-1] / 2).exp().mean()},
        "metric ratio, recomputed",
    ),
}


@pytest.mark.parametrize("name", POLICY)
def test_a_metric_of_a_policy(name: str) -> None:
    right, wrong, subject = POLICY[name]
    verdict = audit(logging(right))
    assert verdict.holds, str(verdict)
    assert ("MR", subject) in {(f.law, f.subject) for f in audit(logging(wrong)).failures}


def pairs(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Step:
    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = dpo_loss(model, batch, beta)
        return value, {**metrics, **change(metrics)}

    return dpo_step(loss)


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        (lambda m: {"accuracy": 1 - m["accuracy"]}, "metric accuracy, which side"),
        (lambda m: {"margin": -m["margin"]}, "metric margin, which side"),
    ],
    ids=["accuracy", "margin"],
)
def test_which_side_is_right(wrong: Any, subject: str) -> None:
    rows = {f.subject: f.outcome for f in audit(pairs(lambda m: {})).findings}
    assert rows["metric accuracy, which side"] == rows["metric margin, which side"] == "holds"
    assert [f.subject for f in audit(pairs(wrong)).failures] == [subject]


def test_a_sum_beside_a_loss_that_is_a_sum_is_no_fault() -> None:
    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = grpo_loss(model, batch, beta, clip)
        count = batch["mask"].sum()
        return value * count, {**metrics, "kl": metrics["kl"] * count}

    verdict = audit(policy_step(loss))
    assert not [f for f in verdict.failures if f.subject.startswith("averages")], str(verdict)


def test_hinge_pairs_whose_sides_cost_the_same_are_not_asked() -> None:
    def loss(model: Any, batch: Mapping[str, Any], beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = dpo_loss(model, batch, beta)
        return F.relu(value - 1e6) + 0 * value, metrics

    subjects = {f.subject for f in audit(dpo_step(loss)).findings}
    assert not any("which side" in s for s in subjects)
    assert torch.is_grad_enabled()

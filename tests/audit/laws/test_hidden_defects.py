"""Defects that a tolerance on the whole step hides: small weights, rounding inside the code, overflow far out, rows
without a supervised token, conventions, names of metrics. Each beside its fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Metric, Step, StepError, audit
from earnest_audit.law import Law
from earnest_audit.laws import finite_difference, masks, metrics, shadow, splits
from tests.audit.steps import dpo_step, grpo_loss, logprobs, policy_step, sft_step


def failed(step: Step, law: Law) -> set[str]:
    return {f.subject for f in audit(step, laws=[law]).failures}


def held(step: Step, law: Law) -> set[str]:
    return {f.subject for f in audit(step, laws=[law]).findings if f.outcome == "holds"}


def penalised(kl_of: Callable[[Tensor, Mapping[str, Any]], Tensor], logged: float = 1.0) -> Step:
    """GRPO whose penalty weighs a thousandth, in a form of its own."""

    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        policy, found = grpo_loss(model, batch, 0.0, clip)
        value = (kl_of(logprobs(model, batch), batch) * batch["mask"]).sum() / batch["mask"].sum()
        return policy + beta * value, {"kl": logged * value, "policy": policy, "clip_fraction": found["clip_fraction"]}

    step = policy_step(loss)
    step.settings = {**step.settings, "beta": 1e-3}
    return step


def k3(lp: Tensor, batch: Mapping[str, Any]) -> Tensor:
    gap = batch["ref"] - lp
    return gap.exp() - gap - 1


def half_detached(lp: Tensor, batch: Mapping[str, Any]) -> Tensor:
    gap = batch["ref"] - lp
    return gap.exp().detach() - gap - 1


def test_a_term_of_small_weight_is_differentiated_by_itself() -> None:
    subject = "term kl along its own gradient"
    assert subject in held(penalised(k3), finite_difference.LAW)
    assert failed(penalised(half_detached), finite_difference.LAW) == {subject}


def sft(form: Callable[[Tensor], Tensor]) -> Step:
    """The mean likelihood, from logits by ``form``."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        lp = form(model(batch["ids"], batch["attention"])[:, :-1])
        labels = batch["labels"][:, 1:]
        on = labels >= 0
        return -(lp.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * on).sum() / on.sum()

    return sft_step(loss)


def test_rounding_inside_the_code_is_seen_inside_a_float64_copy() -> None:
    law = finite_difference.LAW
    assert finite_difference.ALONG in held(sft(lambda logits: logits.float().log_softmax(-1)), law)
    assert failed(sft(lambda logits: logits.bfloat16().float().log_softmax(-1)), law) == {finite_difference.ALONG}


def test_log_probs_are_driven_to_underflow() -> None:
    assert not failed(sft(lambda logits: logits.log_softmax(-1)), shadow.LAW)
    assert failed(sft(lambda logits: logits.softmax(-1).log()), shadow.LAW) == {"confident outputs"}


def test_log_probs_of_a_policy_gradient_are_driven_too() -> None:
    def ratios(of: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> Tensor:
            a, ratio = batch["advantages"][:, None], of(logprobs(model, batch), batch["old"])
            surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
            return (surrogate * batch["mask"]).sum() / batch["mask"].sum()

        step = policy_step(loss)
        step.roles = {k: v for k, v in step.roles.items() if k != "reference"}
        step.metrics, step.settings = {}, {"beta": 0.0, "clip": 0.2}
        return step

    assert "confident outputs" in held(ratios(lambda lp, old: (lp - old).exp()), shadow.LAW)
    both = {"confident outputs", "far ratios"}
    assert failed(ratios(lambda lp, old: lp.exp() / old.exp()), shadow.LAW) == both


def test_margins_are_driven_to_overflow() -> None:
    def preference(form: Callable[[Tensor], Tensor]) -> Step:
        def loss(model: Any, batch: Mapping[str, Any], beta: float) -> Tensor:
            sides = []
            for side in ("chosen", "rejected"):
                row = {"ids": batch[side], "attention": batch[f"{side}_attention"]}
                sides.append((logprobs(model, row) * batch[f"{side}_mask"]).sum(-1) - batch[f"ref_{side}"])
            return -form(beta * (sides[0] - sides[1])).mean()

        step = dpo_step(loss)
        step.metrics = {}
        return step

    assert "far margins" in held(preference(F.logsigmoid), shadow.LAW)
    assert "far margins" in failed(preference(lambda x: x.sigmoid().log()), shadow.LAW)


def test_an_undeclared_tensor_of_a_row_without_supervision_does_not_enter() -> None:
    """A router's or a length's cost, taken over all rows."""

    def costed(masked: bool) -> Step:
        def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
            value, found = grpo_loss(model, batch, beta, clip)
            lp, taught = logprobs(model, batch), batch["mask"].any(-1).float()
            rows = (lp.mean(-1) * batch["cost"] * (taught if masked else 1.0)).sum() / taught.sum()
            return value - rows, found

        step = policy_step(loss)
        step.batch = {**step.batch, "cost": torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0])}
        return step

    assert "a fully masked row" in failed(costed(False), masks.LAW)
    assert "a fully masked row" in held(costed(True), masks.LAW)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_declared_reduction_is_checked(reduction: str) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        labels = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction=reduction)

    other = {"mean": "sum", "sum": "mean"}[reduction]
    assert not failed(sft_step(loss), splits.LAW)
    assert not failed(sft_step(loss, reduction=reduction), splits.LAW)
    assert failed(sft_step(loss, reduction=other), splits.LAW) == {"every row twice"}
    with pytest.raises(StepError, match="unknown reduction 'average'"):
        sft_step(loss, reduction="average")


def test_a_term_of_small_weight_is_added_up_by_itself() -> None:
    def whole(logged: float) -> Step:
        step = penalised(k3, logged)
        step.metrics = {**step.metrics, "policy": Metric(weight=1.0)}
        return step

    subject = "term kl by itself"
    assert subject in held(whole(1.0), metrics.LAW)
    assert failed(whole(2.0), metrics.LAW) == {subject}


def logging(**values: Callable[[Mapping[str, Tensor]], Any]) -> Step:
    def loss(model: Any, batch: Mapping[str, Any], beta: float, clip: float) -> tuple[Tensor, dict[str, Any]]:
        value, found = grpo_loss(model, batch, beta, clip)
        return value, {"kl": found["kl"], **{name: make(found) for name, make in values.items()}}

    step = policy_step(loss)
    step.metrics = {"kl": (0.0, None)}
    return step


def test_usual_names_of_metrics_have_a_range_and_move() -> None:
    fraction: Callable[[Mapping[str, Tensor]], Any] = lambda found: found["clip_fraction"]  # noqa: E731
    good = logging(clip_fraction=fraction, truncation_rate=lambda _: 0.25, learning_rate=lambda _: 3.0,
                   ratio=lambda _: 1.0)  # fmt: skip
    assert not {s for s in failed(good, metrics.LAW) if "unchanged" not in s and "recomputed" not in s}
    assert "metric clip_fraction" in failed(logging(clip_fraction=lambda _: 0.0), metrics.LAW)
    assert "metric win_rate" in failed(logging(win_rate=lambda found: 5 * found["clip_fraction"] + 2), metrics.LAW)
    assert "metric prob_ratio" in failed(logging(prob_ratio=lambda found: -found["kl"] - 1), metrics.LAW)
    constant = logging(clip_fraction=lambda _: 0.0)
    constant.metrics = {**constant.metrics, "clip_fraction": Metric(0.0, 1.0, moves=False)}
    assert "metric clip_fraction" not in failed(constant, metrics.LAW)

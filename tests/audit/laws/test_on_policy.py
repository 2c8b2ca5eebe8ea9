"""Law PG-ONPOLICY: whitened advantages, clips that act at ratio 1, shares per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Setting, Step, Verdict, audit
from earnest_audit.laws import clipping, masks, on_policy, ratio, splits
from tests.audit.steps import Tiny, grpo_loss, logprobs, policy_batch, policy_step


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.outcome for f in verdict.findings}


def whitened(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    a: Tensor = batch["advantages"]
    return grpo_loss(model, {**batch, "advantages": (a - a.mean()) / (a.std() + 1e-8)}, **knobs)


def centred(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    return grpo_loss(model, {**batch, "advantages": batch["advantages"] - batch["advantages"].mean()}, **knobs)


def turned(model: nn.Module, batch: Mapping[str, Any], **knobs: Any) -> Any:
    return whitened(model, {**batch, "advantages": -batch["advantages"]}, **knobs)


LAWS = [on_policy.LAW, clipping.LAW, splits.LAW]


@pytest.mark.parametrize("loss", [whitened, centred])
def test_whitened_advantages_are_legitimate_where_rows_interact(loss: Any) -> None:
    verdict = audit(policy_step(loss, rows_interact=True), laws=LAWS)
    assert verdict.holds, str(verdict)
    found = outcomes(verdict)
    assert found["clip"] == "not applicable" and found[on_policy.THROUGH] == "holds"


def test_a_lost_sign_is_seen_through_the_whitening() -> None:
    verdict = audit(policy_step(turned, rows_interact=True), laws=[on_policy.LAW])
    assert [f.subject for f in verdict.failures] == ["descending the loss raises Σ A·lp"], str(verdict)


def test_rows_that_interact_elsewhere_keep_the_on_policy_law() -> None:
    found = outcomes(audit(policy_step(rows_interact=True), laws=LAWS))
    assert found[on_policy.THROUGH] == found[on_policy.RAISES] == "holds"
    assert found["clip"] == "not applicable"


@pytest.mark.parametrize("name", ["smooth_eps", "huber_delta", "reward_clip", "cliprange_value"])
def test_a_setting_with_a_part_of_a_clips_name_is_no_clip(name: str) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float, **more: float) -> Any:
        value, metrics = grpo_loss(model, batch, beta, clip)
        return value / (1 + more[name]), metrics  # acts at ratio 1, legitimately

    step = policy_step(loss)
    step.settings = {**step.settings, name: 1.0}
    verdict = audit(step, laws=[on_policy.LAW])
    assert verdict.holds, str(verdict)
    assert {s for s in outcomes(verdict) if s.startswith("clip ")} == {"clip clip at ratio 1"}


def test_a_clip_that_acts_at_ratio_one_is_seen() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, eps_clip: float) -> Any:
        value, metrics = grpo_loss(model, batch, beta, eps_clip)
        return value * eps_clip, metrics

    step = policy_step()
    step.loss, step.settings = loss, {"beta": 0.04, "eps_clip": 0.2}
    assert outcomes(audit(step, laws=[on_policy.LAW]))["clip eps_clip at ratio 1"] == "fails"


LAWS_RATIO = [on_policy.LAW, ratio.LAW, clipping.LAW]


DTYPES = (torch.float32, torch.bfloat16)


ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "advantages": "advantages"}


def failures(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


def mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, a: Tensor, clip: float, pick: Any = torch.minimum) -> Tensor:
    return -pick(r * a, r.clamp(1 - clip, 1 + clip) * a)


def step(loss: Any, knobs: dict[str, float], dtype: torch.dtype = torch.float32, **more: Any) -> Step:
    model = Tiny().to(dtype)
    batch = policy_batch(model)
    batch["rollout"] = (batch["old"] - 0.03).clamp(max=-1e-3) * batch["mask"]
    roles = more.pop("roles", ROLES)
    return Step(model=model, loss=loss, batch={**batch, **more.pop("batch", {})}, roles=roles, settings=knobs,
                logprobs=logprobs, **more)  # fmt: skip


def weighed(fault: str = "", shape: str = "row") -> Any:
    """One advantage a row, and weights by token: declared ones and a discount."""

    def loss(model: nn.Module, b: Mapping[str, Any], clip: float, gamma: float) -> Tensor:
        m = b["mask"]
        ahead = m.flip(-1).cumsum(-1).flip(-1)
        a = b["advantages"] if shape == "column" else b["advantages"][:, None]
        each = clipped((logprobs(model, b) - b["old"]).exp(), a, clip) * gamma**ahead * b["w"]
        if fault == "dual clip":  # tianshou #433: the floor for negative advantages, on positive ones too
            each = torch.minimum(each, -3.0 * a)
        return (each * (b["attention"][:, 1:] if fault == "attention" else m)).sum() / m.sum()

    return loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["", "dual clip", "attention"])
def test_a_row_shares_its_advantage_as_the_loss_does(fault: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(5)
    w = 2 * torch.rand(policy_batch(Tiny())["mask"].shape, generator=rng)
    made = step(weighed(fault), {"clip": 0.2, "gamma": 0.8}, dtype, roles={**ROLES, "weights": "w"}, batch={"w": w})
    verdict = audit(made, laws=[*LAWS_RATIO, masks.LAW])
    seen = {
        "": set(),
        "dual clip": {"clip: inside the clip range", "clip: outside, to be undone"},
        "attention": {masks.MASKED},
    }
    assert failures(verdict) >= seen[fault] and bool(failures(verdict)) == bool(fault), str(verdict)


def late(model: nn.Module, b: Mapping[str, Any], clip: float, **_: Any) -> Tensor:
    """The right values, and the gradient of the neighbours' log-probs: a second shift."""
    lp = logprobs(model, b)
    other = lp.roll(1, dims=-1)
    return mean(clipped((other + (lp - other).detach() - b["old"]).exp(), b["advantages"][:, None], clip), b["mask"])


@pytest.mark.parametrize(("loss", "warns"), [(late, True), (weighed(), False)], ids=["late", "right"])
def test_the_gradient_goes_through_the_declared_log_probs(loss: Any, warns: bool) -> None:
    made = step(loss, {"clip": 0.2, "gamma": 1.0}, batch={"w": torch.ones_like(policy_batch(Tiny())["mask"])})
    verdict = audit(made, laws=[on_policy.LAW])
    assert [f.subject for f in verdict.warnings] == ([on_policy.THROUGH] if warns else []), str(verdict)
    assert not verdict.failures


@pytest.mark.parametrize("turned", [False, True])
def test_advantages_in_a_column_are_one_a_row(turned: bool) -> None:
    column = {"advantages": policy_batch(Tiny())["advantages"][:, None], "w": torch.ones(5, 11)}
    loss = weighed("dual clip" if turned else "", shape="column")
    verdict = audit(step(loss, {"clip": 0.2, "gamma": 1.0}, batch=column), laws=LAWS_RATIO)
    assert verdict.holds != turned, str(verdict)


@pytest.mark.parametrize("value_is_loss", [True, False])
def test_a_detached_weight_times_a_log_prob_is_declared(value_is_loss: bool) -> None:
    """There ∂L/∂behaviour is the slope of the weight, and not the weight of the token."""

    def loss(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        lp = logprobs(model, batch)
        weight = (lp.detach() - batch["old"]).exp().clamp(max=clip)
        return -(weight * batch["advantages"][:, None] * lp * batch["mask"]).sum() / batch["mask"].sum()

    step = policy_step(loss)
    step.settings, step.metrics, step.value_is_loss = {"clip": Setting(3.0, "bound")}, {}, value_is_loss
    rows = {f.subject: f.outcome for f in audit(step, laws=[on_policy.LAW]).findings}
    assert rows[on_policy.THROUGH] == ("warns" if value_is_loss else "not applicable")

"""Losses of log-probs in the form of verl and of prime-rl, written here: a planted bug is found, and the right version
is clean."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from earnest_audit import Metric, Setting, audit
from earnest_audit.frontends import prime_rl, verl


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def clipped(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str, config: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective with two bounds, a mean over tokens."""
    assert loss_agg_mode == "token-mean"
    ratio = (log_prob - old_log_prob).exp()
    bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.get("clip_ratio_high"))
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    return masked_mean(loss, response_mask), {"clipfrac": masked_mean((ratio != bounded).float(), response_mask)}


def one_bound(*args: Any) -> Any:
    """The upper bound is a copy of the lower one: clip_ratio_high is never read."""
    *tensors, mode, config = args
    return clipped(*tensors, mode, SimpleNamespace(clip_ratio_low=config.clip_ratio_low, get=lambda name: 0.2))


def old_has_a_gradient(old_log_prob: Tensor, log_prob: Tensor, *rest: Any) -> Any:
    """The ratio is of the current policy to itself: the old log-probs are ignored."""
    return clipped(log_prob.detach(), log_prob, *rest)


def padded_mean(old: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, mode: str, config: Any) -> Any:
    """The mean is over the padded width: more padding changes the gradient."""
    loss, metrics = clipped(old, log_prob, advantages, mask, mode, config)
    return loss * mask.sum() / mask.numel(), metrics


@pytest.mark.parametrize(
    ("loss", "law"), [(clipped, None), (one_bound, "KG"), (old_has_a_gradient, "IG"), (padded_mean, "MI")]
)
def test_a_policy_loss_of_verl(loss: Any, law: str | None) -> None:
    config = SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.28)
    settings = {"clip_ratio_low": Setting(0.2, "clip"), "clip_ratio_high": Setting(0.28, "clip high")}
    step = verl(loss, config=config, settings=settings, metrics={"clipfrac": Metric(low=0.0, high=1.0)})
    found = {f.law for f in audit(step).failures}
    assert found == set() if law is None else law in found, found


@dataclass
class Inputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass
class Outputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def importance(inputs: Inputs, ratio_cap: float, kl_weight: float) -> Outputs:
    """A capped importance weight on log π, and a quadratic penalty on the log-ratio to the reference."""
    assert inputs.ref_logprobs is not None
    weight = (inputs.trainer_logprobs - inputs.inference_logprobs).exp().detach().clamp(max=ratio_cap)
    policy = -weight * inputs.advantages * inputs.trainer_logprobs
    kl = 0.5 * (inputs.trainer_logprobs - inputs.ref_logprobs).square()
    per_token = (policy + kl_weight * kl)[inputs.loss_mask]
    return Outputs(per_token.sum(), {"kl": kl[inputs.loss_mask].mean()})


def everywhere(inputs: Inputs, **settings: float) -> Outputs:
    """The mask is not read."""
    inputs.loss_mask = torch.ones_like(inputs.loss_mask)
    return importance(inputs, **settings)


def detached_penalty(inputs: Inputs, ratio_cap: float, kl_weight: float) -> Outputs:
    found, none = (importance(inputs, ratio_cap, weight) for weight in (kl_weight, 0.0))
    return Outputs(none.loss + (found.loss - none.loss).detach(), found.metrics)


@pytest.mark.parametrize(
    ("loss", "laws"), [(importance, set()), (everywhere, {"MI"}), (detached_penalty, {"KG", "IG"})]
)
def test_a_loss_of_prime_rl(loss: Any, laws: set[str]) -> None:
    settings = {"ratio_cap": Setting(1.05, "bound"), "kl_weight": Setting(0.1, "weight")}
    step = prime_rl(
        loss, settings=settings, inputs=Inputs, reference=True, value_is_loss=False, metrics={"kl": Metric(low=0.0)}
    )
    found = {f.law for f in audit(step).failures}
    assert laws <= found if laws else not found, found


def copies_its_config(*args: Any) -> Any:
    *tensors, mode, config = args
    return clipped(*tensors, mode, copy.deepcopy(config))


def test_a_loss_of_verl_may_copy_its_config() -> None:
    settings = {"clip_ratio_low": Setting(0.2, "clip"), "clip_ratio_high": Setting(0.2, "clip high")}
    found = audit(verl(copies_its_config, config=SimpleNamespace(), settings=settings))
    assert found.holds and not found.errors, str(found)

"""Law PG-REWARD: steps that compute their advantages from rewards; each defect beside a correct twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Step, Verdict, audit
from earnest_audit.laws import clipping, on_policy, ratio, rewards
from tests.audit.steps import Tiny, logprobs, most, policy_batch

OURS = [on_policy.LAW, ratio.LAW, clipping.LAW, rewards.LAW]


DTYPES = (torch.float32, torch.bfloat16)


ROLES = {"ids": "ids", "attention": "attention", "mask": "mask", "behaviour": "old", "rewards": "rewards"}


BETTER = "a better reward raises its row"


EQUAL = "rewards that are equal within every group"


AT_REFERENCE = "a row at the reference, not above it"


def failures(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


def mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, a: Tensor, clip: float, pick: Any = torch.minimum) -> Tensor:
    return -pick(r * a, r.clamp(1 - clip, 1 + clip) * a)


def each(r: Tensor, g: Tensor, fn: Any, same: bool = True) -> Tensor:
    return torch.stack([fn(r[(g == x) == same]) for x in g])


# Estimators in the step: right ones of several kinds, one that divides by the mean among them, and wrong ones.
RIGHT = {
    "grpo": lambda r, g: (r - each(r, g, torch.mean)) / (each(r, g, torch.std) + 1e-4),
    "centred": lambda r, g: r - each(r, g, torch.mean),
    "over the mean": lambda r, g: (r - each(r, g, torch.mean)) / (each(r, g, torch.mean) + 1e-6),
    "leave one out": lambda r, g: (r - each(r, g, torch.mean)) * 1.5,  # groups of three
}  # fmt: skip


def turned(r: Tensor, g: Tensor) -> Tensor:
    return each(r, g, torch.mean) - r


WRONG = {
    "turned": (turned, {BETTER}),
    "neighbour's": (lambda r, g: r - each(r, g, torch.mean, same=False), {EQUAL}),
    "none": (lambda r, _: r, {EQUAL}),
}


def grouped(estimator: Any, dtype: torch.dtype = torch.float32, pick: Any = torch.minimum, **more: Any) -> Step:
    def loss(model: nn.Module, b: Mapping[str, Any], clip: float) -> Tensor:
        a = estimator(b["rewards"].float(), b["group"])[:, None]
        return mean(clipped((logprobs(model, b) - b["old"]).exp(), a, clip, pick), b["mask"])

    model = Tiny().to(dtype)
    batch = policy_batch(model)
    batch = {k: torch.cat([v, v[1:2]]) for k, v in batch.items()}
    batch["rewards"] = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25]).to(more.pop("kind", torch.float32))
    batch["group"] = torch.tensor([0, 0, 0, 1, 1, 1])
    return Step(model=model, loss=loss, batch=batch, roles={**ROLES, "group": "group"}, settings={"clip": 0.2},
                logprobs=logprobs, value_is_loss=True, **more)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_estimators_in_the_step_hold(name: str, dtype: torch.dtype) -> None:
    verdict = audit(grouped(RIGHT[name], dtype), laws=OURS)
    assert verdict.holds, str(verdict)
    held = {f.subject for f in verdict.findings if f.outcome == "holds"}
    assert {BETTER, EQUAL, "the ratio's power", "clip: outside, to be undone", "clip clip at ratio 1"} <= held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_seen(name: str, dtype: torch.dtype) -> None:
    estimator, seen = WRONG[name]
    assert failures(audit(grouped(estimator, dtype), laws=OURS)) == seen


def test_a_baseline_over_the_batch_is_declared() -> None:
    assert audit(grouped(lambda r, _: r - r.mean(), rows_interact=True), laws=OURS).holds
    assert failures(audit(grouped(lambda r, _: r.mean() - r, rows_interact=True), laws=OURS)) == {BETTER}


@pytest.mark.parametrize("kind", [torch.long, torch.bool], ids=str)
def test_counted_rewards_are_rewards(kind: torch.dtype) -> None:
    assert audit(grouped(RIGHT["centred"], kind=kind), laws=OURS).holds
    assert failures(audit(grouped(turned, kind=kind), laws=OURS)) == {BETTER}


def test_a_step_with_its_own_advantages() -> None:
    """The whole audit: the family follows from the role, the cost is within its bound, the clip is judged."""
    step = grouped(RIGHT["centred"])
    whole = audit(step)
    assert step.kind == "policy gradient" and whole.holds, str(whole)
    assert whole.cost <= most(step)
    seen = failures(audit(grouped(RIGHT["centred"], pick=torch.maximum), laws=OURS))
    assert seen == {"clip: outside, already done", "clip: outside, to be undone"}


def with_kl(sign: float, form: str, whiten: bool) -> Step:
    """The reward at the last token, a KL to the reference at every one; returns to go are the advantages."""

    def loss(model: nn.Module, b: Mapping[str, Any], clip: float, kl_coef: float) -> Tensor:
        m, gap = b["mask"], b["ref"] - b["old"]
        kl = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - 1 - gap}[form]
        paid = -sign * kl_coef * kl * m
        last = (m * torch.arange(1, m.shape[1] + 1)).argmax(-1, keepdim=True)
        paid = paid.scatter_add(-1, last, b["rewards"][:, None])
        a = paid.flip(-1).cumsum(-1).flip(-1)
        if whiten:
            a = (a - mean(a, m)) / (mean((a - mean(a, m)).square(), m).sqrt() + 1e-8)
        return mean(clipped((logprobs(model, b) - b["old"]).exp(), a, clip), m)

    model = Tiny()
    batch = policy_batch(model)
    batch["rewards"] = torch.tensor([1.0, 0.0, 0.5, -1.0, 1.0])
    return Step(model=model, loss=loss, batch=batch, roles={**ROLES, "reference": "ref"}, rows_interact=whiten,
                settings={"clip": 0.2, "kl_coef": 0.05}, logprobs=logprobs, value_is_loss=True)  # fmt: skip


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("form", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_is_a_cost(form: str, whiten: bool) -> None:
    right = audit(with_kl(1.0, form, whiten), laws=OURS)
    assert right.holds and AT_REFERENCE in {f.subject for f in right.findings}, str(right)
    assert failures(audit(with_kl(-1.0, form, whiten), laws=OURS)) == {AT_REFERENCE}  # TRL #463's kin


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_baseline_makes_advantages_of_rewards(sign: float) -> None:
    """Plain REINFORCE with a running mean: also where rewards are declared as advantages."""

    def loss(model: nn.Module, b: Mapping[str, Any]) -> Tensor:
        return -mean(sign * (b["rewards"] - 0.35)[:, None] * logprobs(model, b), b["mask"])

    model = Tiny()
    batch = {**policy_batch(model), "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0])}
    roles = {k: v for k, v in ROLES.items() if k != "behaviour"}
    step = Step(model=model, loss=loss, batch=batch, roles=roles, logprobs=logprobs, value_is_loss=False)
    assert failures(audit(step, laws=OURS)) == (set() if sign > 0 else {BETTER})
    step.roles = {**{k: v for k, v in roles.items() if k != "rewards"}, "advantages": "rewards"}
    verdict = audit(step, laws=[on_policy.LAW])
    assert bool(verdict.failures) == (sign < 0), str(verdict)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_row_that_is_left_out_of_the_loss_counts_in_the_baseline(sign: float) -> None:
    """The worst row is truncated: its reward moves the others alone, and the next row is tried."""

    def loss(model: nn.Module, b: Mapping[str, Any], clip: float) -> Tensor:
        a = sign * (b["rewards"] - b["rewards"].mean())[:, None]
        return mean(clipped((logprobs(model, b) - b["old"]).exp(), a, clip), b["mask"] * ~b["truncated"][:, None])

    model = Tiny()
    batch = {**policy_batch(model), "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0])}
    batch["truncated"] = torch.tensor([False, True, False, False, False])
    step = Step(model=model, loss=loss, batch=batch, roles=ROLES, settings={"clip": 0.2}, rows_interact=True)
    step.logprobs = logprobs
    (found,) = audit(step, laws=[rewards.LAW]).findings
    assert found.subject == BETTER and found.outcome == ("holds" if sign > 0 else "fails"), found

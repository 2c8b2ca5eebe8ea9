"""GAE: each defect fails the row that is about it; correct twins hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from earnest_audit import GAE, Verdict, audit


def failures(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, fault: str = "", whiten: bool = False
) -> Any:
    """Backwards over the tokens; masked ones are passed over."""
    out = []
    carry, ahead = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t] != 0
        surprise = rewards[:, t] + (1.0 if fault == "no gamma" else gamma) * ahead - values[:, t]
        weight = {"no lambda": gamma, "lambda twice": gamma * lam * lam}.get(fault, gamma * lam)
        new = surprise + weight * carry
        carry = torch.where(on, new, torch.zeros_like(carry) if fault == "cut at holes" else carry)
        ahead = values[:, t] if fault == "from padding" else torch.where(on, values[:, t], ahead)
        out.append(torch.where(on, carry, torch.zeros_like(carry)))
    advantages = torch.stack(out[::-1], dim=1)
    returns = advantages + values
    if whiten:
        seen = advantages[mask != 0]
        advantages = (advantages - seen.mean()) / (seen.std() + 1e-8) * mask
        returns = advantages + values if fault == "whitened first" else returns
    return advantages, returns


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_right_gae_holds(seed: int, whiten: bool) -> None:
    for holes in (False, True):
        verdict = audit(GAE(lambda *a: gae(*a, whiten=whiten), whitened=whiten, holes=holes, seed=seed))
        assert verdict.holds, str(verdict)
    if not whiten:
        assert audit(GAE(lambda *a: gae(*a)[0], seed=seed)).holds, "without returns"


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        ("no gamma", "advantages, λ = 0.7"),  # Stoix #142's kin
        ("no lambda", "advantages, λ = 0.7"),
        ("no lambda", "advantages, λ = 0"),
        ("lambda twice", "advantages, λ = 0.7"),
        ("from padding", "values where masked, in the advantages"),  # TRL #5303 and #3750
        ("whitened first", "returns, λ = 1"),
        ("cut at holes", "returns, λ = 1"),
    ],
)
def test_a_fault_of_gae_is_seen(fault: str, row: str) -> None:
    whiten = fault == "whitened first"
    seen = failures(audit(GAE(lambda *a: gae(*a, fault=fault, whiten=whiten), whitened=whiten, holes=True)))
    assert row in seen, seen


def test_whitened_advantages_alone_cannot_be_judged() -> None:
    verdict = audit(GAE(lambda *a: gae(*a, whiten=True)[0], whitened=True))
    assert not verdict.failures and "not declared" in {f.outcome for f in verdict.findings}


def test_gae_leaves_its_inputs_alone() -> None:
    def written(r: Tensor, v: Tensor, m: Tensor, gamma: float, lam: float) -> Any:
        v *= m
        r[:, 0] += 0.5
        return gae(r, v, m, gamma, lam)

    seen = [f for f in audit(GAE(written)).failures if f.subject == "the inputs afterwards"]
    assert len(seen) == 1 and "rewards changed" in seen[0].measured
    masked = GAE(lambda r, v, m, *k: gae(r, v.mul_(m), m, *k))
    assert audit(masked).holds, "nothing to change: values are 0 where masked"
    assert audit(GAE(lambda r, *a: gae(r.neg_().neg_(), *a))).holds
    flipped = GAE(lambda r, *a: gae(r.mul_(2).clone().mul_(0.5), *a))
    assert failures(audit(flipped)) == {"the inputs afterwards"}
    flipped.in_place = True
    assert audit(flipped).holds

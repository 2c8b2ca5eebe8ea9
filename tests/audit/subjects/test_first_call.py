"""FirstCall: references and caches that are filled lazily, each defect beside its fix."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import FirstCall, audit

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Policy(nn.Module):
    """A policy with a reference that is copied at once, at first use, or not at all, and a cache of merged weights."""

    def __init__(self, copies: str = "at once", invalidates: bool = True) -> None:
        super().__init__()
        self.layer, self.copies, self.invalidates = nn.Linear(3, 2), copies, invalidates
        self.kept: list[Any] = [copy.deepcopy(self.layer)] if copies == "at once" else []
        self.merged: Tensor | None = None

    def reference(self) -> Tensor:
        if self.copies == "never":
            return self.layer(X)
        self.kept = self.kept or [copy.deepcopy(self.layer)]
        return self.kept[0](X)

    def cached(self) -> Tensor:
        if self.merged is None:
            self.merged = self.layer.weight.detach().clone()
        return X @ self.merged.T

    def train_a_step(self) -> None:
        with torch.no_grad():
            self.layer.weight.add_(0.1)
        self.merged = None if self.invalidates else self.merged


def failed(**more: Any) -> set[str]:
    subject = FirstCall(train=Policy.train_a_step, **more)
    return {f.subject for f in audit(subject).failures}


def test_a_reference_is_the_same_whenever_it_is_first_called() -> None:
    assert not failed(make=Policy, call=Policy.reference)
    assert failed(make=lambda: Policy("at first use"), call=Policy.reference) == {"first called after training"}
    both = {"after training", "first called after training"}
    assert failed(make=lambda: Policy("never"), call=Policy.reference) == both


def test_a_reference_is_the_same_in_a_new_process() -> None:
    drawn = torch.Generator().manual_seed(3)

    def make() -> Policy:
        policy = Policy()
        with torch.no_grad():
            policy.kept[0].weight.add_(torch.randn(2, 3, generator=drawn))
        return policy

    assert "two fresh objects" in failed(make=make, call=Policy.reference)


def test_a_cache_follows_the_training() -> None:
    assert not failed(make=Policy, call=Policy.cached, constant=False)
    stale = failed(make=lambda: Policy(invalidates=False), call=Policy.cached, constant=False)
    assert stale == {"called before and after training"}
